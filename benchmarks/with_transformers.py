"""transformers' Llama in the same shape, trained as its users do who care for speed: layers
compiled one by one, liger's fused loss where it is installed, AdamW fused, gradients clipped.

Two arithmetics: `hf` keeps weights and moments in fp32 and multiplies in bf16 (autocast), as
foundling does; `hf-bf16` has everything in bf16, weights and moments too, which is faster and loses
small updates. `hf-plain` is `hf` with whole logits, whether liger is there or not. The loss is
asked of the hidden state directly, as liger's own patch does.
"""

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foundling.bench.loss_check import Portion, course_lr
from foundling.config.errors import ConfigError
from foundling.config.model import ModelConfig
from foundling.config.run import RunConfig
from foundling.profiling.step_runner import WARM_UP, BenchRows, Marks, Timed, forget_step
from foundling.runtime.device import (
    DeviceChoice,
    free_cached_memory,
    memory_usage,
    reset_peak_memory,
    translate_out_of_memory,
)

MOST_GRAPHS = 1024


class HfTrainer:
    """A Llama of transformers with its optimizer on the device."""

    def __init__(self, name: str, config: RunConfig, choice: DeviceChoice) -> None:
        self.config, self.device, self.compute = config, choice.device, choice.dtype
        self.pure, wants_liger = name == "hf-bf16", name != "hf-plain"
        self.model = _llama(config, choice.device, torch.bfloat16 if self.pure else torch.float32)
        if choice.device.type == "cuda":
            _let_compile()
            for layer in self.model.model.layers:
                layer.compile(dynamic=False)
        optim = config.optim
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )
        self.liger = _liger() if wants_liger and choice.device.type == "cuda" else None
        self.how = self._how(wants_liger)

    def _how(self, wants_liger: bool) -> str:
        import transformers

        if self.pure:
            dtype = "weights, gradients and moments in bf16"
        elif self.compute == torch.float32:
            dtype = "fp32"
        else:
            dtype = "fp32 weights and moments, bf16 autocast"
        loss = "plain cross-entropy on whole logits"
        if wants_liger:
            on_gpu = self.device.type == "cuda"
            loss += f" ({'liger-kernel is not installed' if on_gpu else 'liger needs a GPU'})"
        if self.liger is not None:
            loss = "liger's fused linear cross-entropy"
        compiled = "layers compiled" if self.device.type == "cuda" else "eager"
        mask = ", causal over whole rows: data.document_mask is ours alone"
        return (
            f"transformers {transformers.__version__} LlamaForCausalLM, {dtype}, {compiled}, SDPA,"
            f" {loss}, AdamW fused, gradients clipped"
            f"{mask if self.config.data.document_mask else ''}"
        )

    def timed(
        self, rows: BenchRows, count: int, *, size: int, micro_steps: int = 1, warmup: int = WARM_UP
    ) -> Timed:
        """As Stepper says."""
        each = size * micro_steps
        drawn = [
            [self._drawn(rows, step * each + micro * size, size) for micro in range(micro_steps)]
            for step in range(min(warmup + count, 4))
        ]
        positions = size * micro_steps * self.config.train.seq_len
        found = Timed(size, micro_steps, positions=positions)
        lr = self.config.optim.lr / 10  # as ours
        for number in range(warmup):
            self._step(drawn[number % len(drawn)], lr)
        reset_peak_memory(self.device)
        marks = Marks(self.device)
        losses = []
        for number in range(warmup, warmup + count):
            losses.append(self._step(drawn[number % len(drawn)], lr))
            marks.mark()
        found.step_s = marks.seconds()
        found.losses = [float(loss) for loss in losses]
        found.allocated = memory_usage(self.device)["memory_peak"]
        found.reserved = memory_usage(self.device)["memory_peak_reserved"]
        return found

    def learn(self, text: BenchRows, portions: Sequence[Portion]) -> None:
        """Take steps on text as ours has taken them for the loss check: at its power limit a device
        was faster after them (docs/performance.md), and whoever is compared must be where we are.
        """
        at = 0
        for number, portion in enumerate(portions):
            batches = [self._drawn(text, start, portion.rows) for start in portion.starts(at)]
            self._step(batches, course_lr(self.config, number))
            at += portion.total

    def recover(self) -> None:
        """After a step that did not fit."""
        forget_step(self.optimizer)
        free_cached_memory()

    def _drawn(self, rows: BenchRows, start: int, size: int) -> tuple[Tensor, Tensor]:
        batch = rows.batch(start, size)
        return (
            torch.as_tensor(batch.inputs).to(self.device),
            torch.as_tensor(batch.targets).to(self.device),
        )

    @translate_out_of_memory()
    def _step(self, batches: Sequence[tuple[Tensor, Tensor]], lr: float) -> Tensor:
        mixed = self.compute != torch.float32 and not self.pure
        total = torch.zeros((), device=self.device)
        for inputs, targets in batches:
            with torch.autocast(self.device.type, self.compute, enabled=mixed):
                hidden = self.model.model(input_ids=inputs, use_cache=False).last_hidden_state
                loss = self._loss(hidden.flatten(0, 1), targets.flatten()) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.clip or 1e9)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        if self.liger is not None:
            found: Tensor = self.liger(self.model.lm_head.weight, hidden, targets)
            return found
        return F.cross_entropy(self.model.lm_head(hidden).float(), targets)


def _let_compile() -> None:
    """dynamo gives up after eight versions of a function, and quietly: batch sizes times layers
    are more."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)


def _liger() -> Any:
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()


def refuse_contender(name: str, config: RunConfig, choice: DeviceChoice) -> None:
    """What cannot be compared with, told before anything is timed."""
    if name == "hf-bf16" and choice.dtype == torch.float32:
        raise ConfigError("--compare hf-bf16 needs train.dtype bf16; compare with hf.")
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            f"--compare {name} needs transformers; install benchmarks/requirements.txt."
        )
    if obstacle := llama_obstacle(config.model):
        raise ConfigError(
            f"--compare {name} builds a Llama, and {obstacle}; compare with a Llama-like target."
        )


def _llama(config: RunConfig, device: torch.device, dtype: torch.dtype) -> Any:
    transformers: Any = importlib.import_module("transformers")
    model = config.model
    shape = transformers.LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.dim,
        intermediate_size=model.ffn_dim,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_width,
        max_position_embeddings=config.train.seq_len,
        rms_norm_eps=model.norm_eps,
        rope_theta=model.rope_theta,
        tie_word_embeddings=model.tie_embeddings,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device(device):
        made = transformers.LlamaForCausalLM(shape)
    return made.to(dtype).train()


def llama_obstacle(model: ModelConfig) -> str:
    """Why this shape is no Llama; empty if it is one."""
    differing = {
        "activation": "swiglu",
        "norm": "rms",
        "qk_norm": False,
        "embed_norm": False,
        "bias": "none",
        "positions": "rotary",
        "windows": (),
        "value_embeds": False,
        "residual_scales": False,
        "logit_softcap": 0.0,
        "dropout": 0.0,
    }
    for name, wanted in differing.items():
        if (value := getattr(model, name)) != wanted:
            return f"model.{name} is {value}"
    return ""
