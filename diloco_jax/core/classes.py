"""Classes of tensors, by their paths: MLP, attention, embedding, norm, or patterns of the user's own."""

import re
from collections.abc import Iterable, Sequence

REST = "rest"  # tensors that are of no other class
# Parts of a path that tell the class. The first line that has one of a path's words counts: 'norm_mlp' is a norm, and
# 'mlp/out' no attention.
_WORDS = (
    ("norm", "norm norms layernorm rmsnorm batchnorm groupnorm ln"),
    ("embedding", "embed embedder embedding embeddings unembed head"),
    ("mlp", "mlp ffn feedforward moe expert experts router"),
    ("attention", "attention attn mha"),
    ("mlp", "up down gate fc"),
    ("attention", "q k v o out qkv query key value"),
)
KNOWN = tuple(dict.fromkeys(name for name, _ in _WORDS))


def class_of(path: str, names: Iterable[str]) -> str:
    """Return the first of these classes that a tensor is of; `rest` if it is of none."""
    words = set(re.split("[^a-z]+", path.lower()))
    own = next((name for name, known in _WORDS if not words.isdisjoint(known.split())), REST)
    return next((name for name in names if name == own or ("*" in name and matches(path, name))), REST)


def check_classes(names: Sequence[str], where: str) -> None:
    """Check that these name classes of tensors; ValueError if one is no class and no pattern."""
    for name in names:
        if name not in (*KNOWN, REST) and "*" not in name:
            raise ValueError(
                f"{where} names '{name}', which is no class of tensors; use {', '.join(KNOWN)}, {REST}, or a pattern "
                f"of whole paths with a '*', such as '*{name}*'"
            )


def members(paths: Sequence[str], classes: Sequence[Sequence[str]], where: str) -> list[list[str]]:
    """Return which of the tensors each group of classes has.

    Raises:
      ValueError: a class has no tensor, or a tensor no class.
    """
    names = [name for group in classes for name in group]
    check_classes(names, where)
    found = {path: class_of(path, names) for path in paths}
    for name in names:
        if name != REST and name not in found.values():
            raise ValueError(
                f"{where} names '{name}', but no tensor is left for it; the model has {', '.join(paths[:8])}"
                + (" and more" if len(paths) > 8 else "")
            )
    for path, name in found.items():
        if name not in names:
            raise ValueError(f"{where} has no period for '{path}', which is of no class that it names; add {REST}")
    return [[path for path in paths if found[path] in group] for group in classes]


def matches(path: str, pattern: str) -> bool:
    """Say if a pattern fits a whole path: '*' stands for any characters, '/' too, and case counts."""
    return re.fullmatch(".*".join(re.escape(part) for part in pattern.split("*")), path) is not None
