"""Store common records in fewer bytes. The user chooses the codec of a channel or of a decision."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from longpack.errors import ReplayError, UnsupportedError


class Codec(Protocol):
    """Turns a decision into what is stored, and back, without loss."""

    def encode(self, value: Any) -> Any:
        """Return what is stored: new storage, or `value` itself."""
        ...

    def decode(self, stored: Any) -> Any:
        """Return the decision; equal to what was encoded, in dtype, shape and device."""
        ...


@dataclass(frozen=True, slots=True)
class _Narrowed:
    ids: torch.Tensor
    dtype: torch.dtype


@dataclass(frozen=True)
class IdCodec:
    """Store integer ids of [low, high) in the narrowest dtype that holds them.

    Top-8 of 64 experts for 8,192 tokens: 512 KiB as int64, 64 KiB as uint8. The range is
    checked at `encode` where that needs no device synchronisation, which is on the CPU.

    Raises:
        UnsupportedError: for a value that is no integer tensor, or a range beyond int64.
        ReplayError: for an id outside the range.
    """

    high: int
    low: int = 0

    @property
    def dtype(self) -> torch.dtype:
        for dtype in (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32):
            info = torch.iinfo(dtype)
            if info.min <= self.low and self.high - 1 <= info.max:
                return dtype
        return torch.int64

    def encode(self, value: Any) -> _Narrowed:
        if not isinstance(value, torch.Tensor) or value.is_floating_point():
            raise UnsupportedError(
                f"IdCodec stores one integer tensor and got {_kind(value)}; "
                "remove codec= or return the ids alone from the decision"
            )
        if value.device.type == "cpu" and value.numel():
            smallest, largest = (int(x) for x in torch.aminmax(value))
            if smallest < self.low or largest >= self.high:
                raise ReplayError(
                    f"ids from {smallest} to {largest} do not fit IdCodec of "
                    f"[{self.low}, {self.high}); raise high= or lower low="
                )
        return _Narrowed(value.to(self.dtype), value.dtype)

    def decode(self, stored: _Narrowed) -> torch.Tensor:
        return stored.ids.to(stored.dtype)


@dataclass(frozen=True, slots=True)
class _Bits:
    octets: torch.Tensor
    shape: torch.Size


@dataclass(frozen=True)
class BitCodec:
    """Store a bool tensor as bits, eight to a byte.

    A block mask [1, 4, 131072, 1024]: 512 MiB as bool, 64 MiB as bits.

    Raises:
        UnsupportedError: for a value that is no bool tensor.
    """

    def encode(self, value: Any) -> _Bits:
        if not isinstance(value, torch.Tensor) or value.dtype != torch.bool:
            raise UnsupportedError(
                f"BitCodec stores one bool tensor and got {_kind(value)}; "
                "remove codec= or return the mask alone from the decision"
            )
        flat = value.reshape(-1).to(torch.uint8)
        octets = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
        packed = octets[:, 0].clone()
        for bit in range(1, 8):  # one byte a mask element at most, never a wide product
            packed |= octets[:, bit] << bit
        return _Bits(packed, value.shape)

    def decode(self, stored: _Bits) -> torch.Tensor:
        bits = torch.arange(8, dtype=torch.uint8, device=stored.octets.device)
        flat = ((stored.octets[:, None] >> bits) & 1).to(torch.bool).reshape(-1)
        return flat[: stored.shape.numel()].view(stored.shape)


def _kind(value: Any) -> str:
    return f"a {value.dtype} tensor" if isinstance(value, torch.Tensor) else type(value).__name__
