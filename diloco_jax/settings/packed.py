"""The configs that come with the package: where they lie, and a copy of one to begin with."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
SCHEMA_FILE = "diloco.schema.json"  # beside a config that `diloco init` wrote, for editors


def packed() -> dict[str, Path]:
    """Return the configs that come with the package by name, such as quickstart and tpu/moe_v6e."""
    folder = next(path for path in (PACKAGE / "configs", PACKAGE.parent / "configs") if path.is_dir())  # wheel, clone
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))}


def find_config(word: str) -> str:
    """Return the path of the config that people mean: a file, else WORD.yaml, else the one of the package."""
    if Path(word).is_file():
        return word
    own = Path(f"{word}.yaml")  # somebody who has changed a copy means the copy
    return str(own) if own.is_file() else str(packed().get(word, word))


def copy_config(name: str, folder: Path) -> Path:
    """Write a copy of a config of the package for an editor that knows the schema; ValueError if it is there."""
    source = packed()[name]
    target = folder / source.name
    text = source.read_text(encoding="utf-8").replace(f"configs/{name}.yaml", str(target))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(f"# yaml-language-server: $schema={SCHEMA_FILE}\n{text}")
    except FileExistsError:
        raise ValueError(f"{target} is there already; choose another --dir, or move it away") from None
    return target
