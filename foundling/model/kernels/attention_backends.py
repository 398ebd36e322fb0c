"""Attention backends by name, with causal, per-document and windowed masks; varlen packing."""

import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# Documents laid end to end, as flash kernels take them: where each begins in the flattened rows.
#
# A kernel of this kind is given [B x T, H, D] and the first position of every document, and
# computes nothing between two of them. How many there are is part of a compiled graph's shapes, so
# the list is filled up to a power of two with documents of no length, which cost a kernel next to
# nothing. The number itself is known where batches are made, on the host, and travels with the
# tensor: to ask the device for it would make every micro-step wait. Rejected:
# torch.nn.attention.varlen, which is the same operator behind a wrapper that older versions lack.

FEWEST = 4
"""Documents of a row that are planned for at least: fewer shapes to compile."""
_NOTE = "_at_most"


class VarlenMask(NamedTuple):
    """What stands for a mask of documents; a tuple, because compilers look into those."""

    starts: Tensor
    """[N + 1] first position of each document in the flattened rows, int32; the last is the end."""
    window: int
    """Positions that are seen, the own one included; 0: all before."""


def note_count(documents: Tensor, at_most: int) -> Tensor:
    """Say how many documents a tensor [B, T] holds at most, padding counted as one in each row."""
    setattr(documents, _NOTE, at_most)
    return documents


def document_begins(documents: Tensor) -> Tensor:
    """True where a document of [B, T] has its first position in the row."""
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return begins


def packed(documents: Tensor, window: int) -> VarlenMask:
    """The documents [B, T] of a micro-batch; padding at a row's end is one more of them."""
    rows, width = documents.shape
    begins = document_begins(documents)
    at_most = getattr(documents, _NOTE, None)
    if at_most is None:  # a probe or an evaluation: nothing is lost by waiting
        at_most = int(begins.sum())
    places = 1 << (max(at_most, FEWEST * rows) - 1).bit_length()
    total = rows * width
    positions = torch.arange(total, dtype=torch.int32, device=documents.device)
    starts = positions.masked_fill(~begins.flatten(), total).sort().values[:places]
    ends = starts.new_full((places + 1 - len(starts),), total)
    return VarlenMask(torch.cat((starts, ends)), window)


def laid_out(x: Tensor) -> Tensor:
    """[B, H, T, D] to [B x T, H, D]."""
    return x.transpose(1, 2).flatten(0, 1)


def put_back(mixed: Tensor, rows: int) -> Tensor:
    """[B x T, H, D] to [B, H, T, D]."""
    return mixed.view(rows, -1, *mixed.shape[1:]).transpose(1, 2)


# The attention kernels there are, by name, each made to do causal, per-document and windowed
# attention in its own way.
#
# torch                          the backend that scaled_dot_product_attention picks; all on a CPU
# cudnn, flash, efficient, math  that backend of it and no other; a mask is dense, but flash takes
#                                windows and documents without one
# band                           cuDNN for windows without documents (cudnn_band.py), where `cudnn`
#                                (nvidia-cudnn-frontend) is installed
# flash3, flash4                 FlashAttention 3 and 4, where `flash_attn_interface` or
#                                `flash_attn.cute` is installed
# flex                           FlexAttention: blocks of the score matrix that a mask hides are
#                                never computed
#
# A kernel says what it needs instead of a mask (`mask`), and mixes (`attend`). Which one a run uses
# is found by launching them (foundling/train/autotune/attention.py). Rejected: choosing by the
# name of the GPU (a driver or a package may be missing), and leaving it to torch on GPUs (which
# takes flash where cuDNN is 1.6 times as fast, and math where a mask has grouped heads).
#
# Shapes: B batch, T time, H query heads, K key/value heads, D head width.

MOST_GRAPHS = 64
"""Shapes that one function may be compiled for."""


@dataclass(frozen=True)
class MaskSpec:
    """What attention is kept inside of, besides causality; neither: plain causal."""

    documents: Tensor | None = None
    """[B, T], the number of each position's document in its row, -1 for padding."""
    window: int = 0
    """Positions that are seen, the own one included; 0: all before."""

    @property
    def is_plain(self) -> bool:
        """Whether causality says it all."""
        return self.documents is None and not self.window


class Kernel(Protocol):
    """One way to compute attention."""

    @property
    def name(self) -> str:
        """As it is asked for."""
        ...

    def mask(self, spec: MaskSpec, width: int, device: torch.device) -> Any:
        """What `attend` takes for this spec; None for plain causal attention."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float) -> Tensor:
        """q [B, H, T, D] and k, v [B, K, T, D] to [B, H, T, D]."""
        ...

    def refusal(self, spec: MaskSpec, dropout: float) -> str | None:
        """Why this kernel cannot be asked, as far as that is known without launching it."""
        ...


@dataclass(frozen=True)
class Sdpa:
    """scaled_dot_product_attention, held to one backend where one is given."""

    name: str
    backend: SDPBackend | None = None

    def mask(self, spec: MaskSpec, width: int, device: torch.device) -> Tensor | None:
        """True where a position may look, [B or 1, 1, T, T]."""
        return dense_mask(spec, width, device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float) -> Tensor:
        """Causal where there is no mask."""
        if self.backend is None:
            return _sdpa(q, k, v, mask, dropout)
        if self.backend == SDPBackend.EFFICIENT_ATTENTION and k.shape[1] != q.shape[1]:
            # It knows no grouped heads; repeated ones cost far less than every score kept.
            repeats = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        with sdpa_kernel(self.backend):
            return _sdpa(q, k, v, mask, dropout)

    def refusal(self, spec: MaskSpec, dropout: float) -> str | None:
        """Nothing is known before it is launched."""
        return None


@dataclass(frozen=True)
class Flash(Sdpa):
    """The flash backend, whose own operator takes windows and documents without a mask."""

    name: str = "flash"
    backend: SDPBackend | None = SDPBackend.FLASH_ATTENTION

    def mask(self, spec: MaskSpec, width: int, device: torch.device) -> Any:
        """The window's size, or where documents begin."""
        return _without_mask(spec)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float) -> Tensor:
        """A window is counted from the position itself, to the left."""
        if mask is None:
            return super().attend(q, k, v, None, dropout)
        if isinstance(mask, VarlenMask):
            laid = (laid_out(q), laid_out(k), laid_out(v))
            mixed = _flash(*laid, mask.starts, q.shape[2], mask.window, dropout)
            return put_back(mixed, len(q))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return _flash(q, k, v, None, q.shape[1], mask, dropout).transpose(1, 2)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, width: int, window: int, dropout: float
) -> Tensor:
    """Torch's flash operator: rows [B, T, H, D], or with `starts` documents [B x T, H, D].

    By its own name: scaled_dot_product_attention takes no documents of uneven length."""
    mixed: Tensor = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        starts,
        starts,
        width,
        width,
        dropout,
        True,
        False,
        window_size_left=window - 1 if window else None,
        window_size_right=0 if window else None,
    )[0]
    return mixed


@dataclass(frozen=True)
class Flash3:
    """FlashAttention 3 from a package of its own."""

    name: str = "flash3"
    package: str = "flash_attn_interface"
    remedy: str = ""

    def mask(self, spec: MaskSpec, width: int, device: torch.device) -> Any:
        """The window's size, or where documents begin."""
        return _without_mask(spec)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float) -> Tensor:
        """Its own layout has time before heads."""
        if isinstance(mask, VarlenMask):
            laid = (laid_out(q), laid_out(k), laid_out(v))
            return put_back(self._mixed(*laid, mask.starts, q.shape[2], mask.window), len(q))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return self._mixed(q, k, v, None, q.shape[1], mask or 0).transpose(1, 2)

    def refusal(self, spec: MaskSpec, dropout: float) -> str | None:
        """It is a package of its own, without dropout."""
        if dropout:
            return "it has no dropout"
        if not _is_installed(self.package):
            return f"{self.package} is not installed{self.remedy}"
        return None

    def _mixed(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, width: int, window: int
    ) -> Tensor:
        import flash_attn_interface as library  # a compiler that traces attention understands it

        seen = {"causal": True, "window_size": (window - 1, 0) if window else (-1, -1)}
        if starts is None:
            return _first(library.flash_attn_func(q, k, v, **seen))
        places = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        widths = {"max_seqlen_q": width, "max_seqlen_k": width}
        return _first(library.flash_attn_varlen_func(q, k, v, **places, **widths, **seen))


@dataclass(frozen=True)
class Flash4(Flash3):
    """FlashAttention 4 likewise, whose kernels no compiler can look into."""

    name: str = "flash4"
    package: str = "flash_attn.cute"
    remedy: str = " (pip install 'foundling[flash4]')"

    def _mixed(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, width: int, window: int
    ) -> Tensor:
        from foundling.model.kernels.flash4 import flash4

        mixed: Tensor = flash4(q, k, v, starts, width, window)[0]
        return mixed


@dataclass(frozen=True)
class Band:
    """cuDNN inside a window, by a graph of its own."""

    name: str = "band"

    def mask(self, spec: MaskSpec, width: int, device: torch.device) -> int | None:
        """The window's size; None where a row has no more."""
        return spec.window if spec.window < width else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float) -> Tensor:
        """Only what its graphs know."""
        from foundling.model.kernels.cudnn_band import band

        mixed: Tensor = band(q, k, v, mask or q.shape[2])[0]
        return mixed

    def refusal(self, spec: MaskSpec, dropout: float) -> str | None:
        """It is a package of its own, for windows."""
        if spec.documents is not None or not spec.window:
            return "it knows windows alone, and no documents"
        if dropout:
            return "it has no dropout"
        if not _is_installed("cudnn"):
            return "cudnn is not installed (pip install 'foundling[cudnn]')"
        return None


def _first(out: Any) -> Tensor:
    """Some releases give the sums of the softmax, too."""
    mixed: Tensor = out[0] if isinstance(out, tuple) else out
    return mixed


@dataclass(frozen=True)
class Flex:
    """FlexAttention, compiled; its mask is a table of blocks."""

    name: str = "flex"

    def mask(self, spec: MaskSpec, width: int, device: torch.device) -> Any:
        """A BlockMask, for plain causal attention too."""
        from torch.nn.attention.flex_attention import create_block_mask

        documents, window = spec.documents, spec.window

        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            seen = q >= k
            if window:
                seen = seen & (q - k < window)
            if documents is not None:
                seen = seen & (documents[b, q] == documents[b, k])
            return seen

        rows = None if documents is None else len(documents)
        return create_block_mask(visible, rows, None, width, width, device=str(device))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float) -> Tensor:
        """Plain causal attention is asked with a mask here too."""
        if mask is None:
            mask = self.mask(MaskSpec(), q.shape[2], q.device)
        mixed: Tensor = _flex()(q, k, v, block_mask=mask, enable_gqa=k.shape[1] != q.shape[1])
        return mixed

    def refusal(self, spec: MaskSpec, dropout: float) -> str | None:
        """It drops nothing."""
        return "it has no dropout" if dropout else None


TORCH = Sdpa("torch")
EFFICIENT = Sdpa("efficient", SDPBackend.EFFICIENT_ATTENTION)
KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Flash4(),
        Flash3(),
        Sdpa("cudnn", SDPBackend.CUDNN_ATTENTION),
        Band(),
        Flash(),
        Flex(),
        EFFICIENT,
        Sdpa("math", SDPBackend.MATH),
        TORCH,
    )
}
"""In the order in which they are tried, and taken where a run must repeat itself."""


def without_gradients(kernel: Kernel, device: torch.device) -> Kernel:
    """What stands in for a kernel in evaluation, where nothing is compiled and every batch has
    another shape: FlexAttention would keep every score then, and cuDNN build a graph for each."""
    if not isinstance(kernel, Flex | Band) or torch.is_grad_enabled():
        return kernel
    if device.type != "cuda":
        return TORCH
    return EFFICIENT if isinstance(kernel, Flex) else KERNELS["flash"]


def _without_mask(spec: MaskSpec) -> VarlenMask | int | None:
    """What flash kernels take: where documents begin, or a window's size, or nothing."""
    if spec.documents is not None:
        return packed(spec.documents, spec.window)
    return spec.window or None


def dense_mask(spec: MaskSpec, width: int, device: torch.device) -> Tensor | None:
    """True where position t may look at s: not after it, in the same document and in the window.

    Padding counts as one more document, so that every position sees at least itself and no softmax
    is empty. None where causality says it all; whether a row holds a second document is looked up
    on the CPU only, where asking does not stall the device.
    """
    documents, window = spec.documents, spec.window
    if documents is not None and documents.device.type == "cpu":
        later, earlier = documents[:, 1:], documents[:, :-1]
        if not bool(((later != earlier) & (later >= 0)).any()):
            documents = None
    if documents is None and not 0 < window < width:
        return None
    places = torch.arange(width, device=device)
    distance = places[:, None] - places
    seen = distance >= 0
    if 0 < window < width:
        seen = seen & (distance < window)
    if documents is None:
        return seen
    return seen & (documents[:, None, :, None] == documents[:, None, None, :])


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    # Without a mask, one query against many keys is a decode step that may see all of them.
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None and q.shape[2] == k.shape[2],
        enable_gqa=k.shape[1] != q.shape[1],
    )


@lru_cache
def _flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # One graph for each shape; after eight, dynamo would quietly keep every score.
    settings = torch.compiler.config
    settings.recompile_limit = max(settings.recompile_limit, MOST_GRAPHS)
    return torch.compile(flex_attention, dynamic=False)


@lru_cache
def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:  # of the package around it
        return False
