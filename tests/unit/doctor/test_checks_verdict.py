"""What the doctor's findings amount to: an exit code, one sentence, and JSON for scripts."""

from foundling.doctor.checks import failed, passed, results_json, verdict_of, warned
from foundling.runtime.exits import Exit

GOOD, ODD = passed("disk", "12 GB free"), warned("time", "a second off")
BAD, UNFIT = failed("data", "is gone"), failed("kernels", "matmul is wrong", of_node=True)


def test_only_a_job_ends_with_the_code_of_an_unfit_node() -> None:
    assert verdict_of([GOOD, ODD], is_job=True) == (Exit.OK, "")
    assert verdict_of([GOOD, BAD, BAD], is_job=True) == (Exit.USER, "2 checks failed: data.")
    sentence = "2 checks failed: data, kernels."
    assert verdict_of([BAD, UNFIT], is_job=False) == (Exit.USER, sentence)
    assert verdict_of([BAD, UNFIT], is_job=True) == (Exit.NODE, sentence)


def test_json_has_the_worst_level_and_every_rank() -> None:
    found = results_json([("rank 0", [GOOD]), ("rank 1", [ODD, BAD])])
    assert found["level"] == "fail"
    assert [(rank["who"], len(rank["lines"])) for rank in found["ranks"]] == [
        ("rank 0", 1),
        ("rank 1", 2),
    ]
