"""The engine over a model that two ranks have parts of: tokens and scores are the whole model's."""

import pytest
from engine_ranks import SHAPES, model_of, said, said_by_ranks
from worlds import World

LAYOUTS = [pytest.param({"tensor": 2}, id="tensor"), pytest.param({"shard": 2}, id="fsdp")]


@pytest.mark.parametrize("degrees", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_write_and_score_as_one_process_does(
    shape: str, degrees: dict[str, int], opened: dict[int, World]
) -> None:
    for step_tokens in (7, 500):
        replies, scores, preempted = said(model_of(shape), step_tokens)
        assert (preempted > 0) == (step_tokens == 7)
        assert len({tuple(reply) for reply in replies}) > len(replies) // 2
        answers = opened[2].run(said_by_ranks, shape, degrees, step_tokens)
        for (their_replies, their_scores, _), heads in answers:
            assert their_replies == replies
            for mine, theirs in zip(scores, their_scores, strict=True):
                assert theirs == pytest.approx(mine, abs=1e-4)
            whole = SHAPES[shape].get("kv_heads", 4)
            assert heads == whole // degrees.get("tensor", 1)
