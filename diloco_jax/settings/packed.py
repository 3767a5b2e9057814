"""The configs that the package includes: their paths, and a copy of one to start with."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
# `diloco init` writes this file beside a config, for editors.
SCHEMA_FILE = "diloco.schema.json"


def packed() -> dict[str, Path]:
    """Return the paths of the packaged configs by name, such as quickstart and tpu/moe_v6e."""
    # A wheel has the configs in the package, a clone has them beside it.
    folder = next(path for path in (PACKAGE / "configs", PACKAGE.parent / "configs") if path.is_dir())
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))}


def find_config(word: str) -> str:
    """Return the path of a config: the file WORD, else WORD.yaml, else the packaged config WORD."""
    if Path(word).is_file():
        return word
    own = Path(f"{word}.yaml")
    # A changed copy in this folder takes precedence over the packaged config.
    return str(own) if own.is_file() else str(packed().get(word, word))


def copy_config(name: str, folder: Path) -> Path:
    """Copy a packaged config into a folder, with a line that names its schema to editors; ValueError if it exists."""
    source = packed()[name]
    target = folder / source.name
    text = source.read_text(encoding="utf-8").replace(f"configs/{name}.yaml", str(target))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(f"# yaml-language-server: $schema={SCHEMA_FILE}\n{text}")
    except FileExistsError:
        raise ValueError(f"{target} exists already; choose another --dir, or move it away") from None
    return target
