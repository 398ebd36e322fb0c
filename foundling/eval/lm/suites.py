"""Lists of the harness's tasks that belong together, by a name of ours."""

SUITES: dict[str, tuple[str, ...]] = {
    "nine": (
        "mmlu",
        "mmlu_pro",
        "ai2_arc",
        "gsm8k",
        "agieval_en",
        "drop",
        "bbh",
        "winogrande",
        "hellaswag",
    ),
    "commonsense": (
        "arc_easy",
        "arc_challenge",
        "hellaswag",
        "winogrande",
        "piqa",
        "openbookqa",
        "boolq",
    ),
    "perplexity": ("wikitext", "lambada_openai"),
}
"""`nine` is what an 8B model that is pretrained further is usually asked; `commonsense` already
tells models of a hundred million parameters apart; `perplexity` tells any."""


def expanded(names: list[str]) -> list[str]:
    """Suites replaced by their tasks, each task once."""
    found = [task for name in names for task in SUITES.get(name, (name,))]
    return list(dict.fromkeys(found))
