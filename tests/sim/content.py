"""What items there are, and what bytes the encoder makes of each."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

# Columns by modality: one block to a row, less than a block, more than one. The guess is 1,024
# columns of float32.
COLUMNS = {"image": 1024, "audio": 640, "video": 1536, "odd": 1024, "prompt_embeds": 1024}
DTYPES = {"odd": torch.float16}  # an encoder whose output has not the model's dtype: never kept


@dataclass(frozen=True)
class Variant:
    """An item: its key, its embeddings (rows), its modality and the length of its placeholder."""

    key: str
    rows: int
    modality: str = "image"
    length: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, COLUMNS[self.modality]

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES.get(self.modality, torch.float32)

    @property
    def placeholder(self) -> int:
        return max(self.length, self.rows, 1)


class Violation(BaseException):
    """Something that must never happen has happened.

    Not an Exception, since those are contained by the connector.
    """


class Content:
    """The bytes of every item, the same in every run; other ones for each generation of the
    encoder's weights.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._made: dict[tuple[str, tuple[int, int], torch.dtype], torch.Tensor] = {}

    def of(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """What the encoder makes of this item with the present weights. Not to be written to."""
        rows, columns = shape
        tensor = self._made.get((key, (rows, columns), dtype))
        if tensor is None:
            text = f"{key} {rows} {columns} {self.generation}"
            data = bytearray(random.Random(text).randbytes(rows * columns * dtype.itemsize))
            tensor = torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(rows, columns)
            self._made[key, (rows, columns), dtype] = tensor
        return tensor

    def variant(self, variant: Variant) -> torch.Tensor:
        return self.of(variant.key, variant.shape, variant.dtype)

    def new_weights(self) -> None:
        self.generation += 1
        self._made.clear()

    def check(self, tensor: torch.Tensor, key: str, where: str) -> None:
        """Raise Violation unless these are exactly the bytes of that key at that shape."""
        right = self.of(key, tuple(tensor.shape), tensor.dtype)
        # Random bytes hold floats that are not equal to themselves, so bytes are compared.
        if not torch.equal(tensor.view(torch.uint8), right.view(torch.uint8)):
            wrong = (tensor.view(torch.uint8) != right.view(torch.uint8)).any(dim=1).nonzero()
            raise Violation(f"{where}: {key} has wrong bytes in rows {wrong.flatten().tolist()}")


def catalogue(rng: random.Random, keys: int) -> list[Variant]:
    """Items of several widths:

    some with placeholders longer than their rows, without rows, or with rows that vary by request.
    """
    items: list[Variant] = []
    for number in range(keys):
        modality = rng.choice(["image", "image", "audio", "video"])
        rows = rng.randrange(1, 6)
        length = rows + rng.choice([0, 0, 0, 3])
        kind = rng.random()
        if kind < 0.05:
            modality = "odd"
        elif kind < 0.12:
            modality = "prompt_embeds"
        elif kind < 0.18:
            rows, length = 0, 3
        key = f"{modality}{number}"
        items.append(Variant(key, rows, modality, length))
        if 0.18 <= kind < 0.35:  # a name that a client gave to two different things
            other = rows + rng.randrange(1, 4)
            items.append(Variant(key, other, modality, other))
    return items
