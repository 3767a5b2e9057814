"""The examples of docs/pytorch.md: configs that load, code that runs, and options that `attach` takes."""

import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

import diloco_jax
from diloco_jax.runtime.records import checkpoint
from diloco_jax.settings.text import parse_text
from diloco_jax.transport.trust import certificates
from diloco_jax.transport.trust.security import credentials
from tests.runtime.helpers import ROOT

PAGE = (ROOT / "docs" / "pytorch.md").read_text()


def block(language: str, first: str) -> str:
    """Return the example that starts with this comment."""
    (found,) = re.findall(rf"```{language}\n(# {first}\n.*?)```", PAGE, re.S)
    return found


def test_the_configs_load() -> None:
    for name, steps in (("torch", 2000), ("trial", 200)):
        config = parse_text(block("yaml", f"{name}.yaml"), "docs/pytorch.md")
        assert config.model.own and config.planned_steps == steps


def test_all_examples_in_python_compile() -> None:
    for text in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        compile(text, "docs/pytorch.md", "exec")


def tied() -> Any:
    """Make a module with a buffer, and a table that two layers share."""
    import torch
    from torch import nn

    module = nn.Module()
    module.embed, module.hidden, module.out = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False)
    module.out.weight = module.embed.weight
    module.register_buffer("count", torch.zeros(()))
    return module


@pytest.mark.extra("parity")
def test_a_snapshot_becomes_the_state_of_a_module_with_shared_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from diloco_jax.adapters.torch.names import placed_parameters

    monkeypatch.chdir(tmp_path)
    trained, model = tied(), tied()
    values = {path: found.parameter.detach().numpy() for path, found in placed_parameters(trained).items()}
    checkpoint.save(Path("runs/mine/checkpoints"), {checkpoint.PARAMETERS: values}, {"global_step": 3, "tokens": 12})
    names = {"model": model, "torch": torch}
    exec(block("python", "Global model from a snapshot."), names)
    assert names["missing"] == ["count", "out.weight"] and names["unexpected"] == []
    assert all(torch.equal(here, there) for here, there in zip(model.parameters(), trained.parameters(), strict=True))
    assert model.out.weight is model.embed.weight and torch.equal(model.out.weight, trained.embed.weight)


def test_the_certificates_of_the_page_are_those_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates.make(tmp_path / "certs", ["a", "b"])
    monkeypatch.chdir(tmp_path)
    text = block("python", "Certificates of this machine.")
    names = {"diloco_jax": diloco_jax}
    exec(text.partition("island = ")[0], names)
    assert credentials(names["transport"], "a") and credentials(names["transport"], "b")
    with pytest.raises(ValueError, match=r"certs/c\.pem"):
        credentials(names["transport"], "c")


@pytest.mark.extra("parity")
def test_the_two_loops_of_the_cookbook_have_one_model(tmp_path: Path) -> None:
    """The last recipe changes two examples, so that both have the same paths, shapes and kinds."""
    from flax import nnx

    import diloco_jax.torch
    from diloco_jax.adapters.nnx.holder import VariableHolder
    from diloco_jax.adapters.torch.holder import TorchHolder

    (recipe,) = re.findall(r"```bash\n(sed .*?)^cat ", (ROOT / "docs" / "cookbook.md").read_text(), re.S | re.M)
    subprocess.run(["bash", "-euc", recipe.replace("docs/", f"{ROOT}/docs/")], cwd=tmp_path, check=True)
    loops = {name: runpy.run_path(str(tmp_path / f"{name}_loop.py")) for name in ("torch", "jax")}
    torch_text, jax_text = ((tmp_path / f"{name}_loop.py").read_text() for name in ("torch", "jax"))
    assert "names=diloco_jax.torch.like_flax(model), **sizes" in torch_text
    assert 'axes={"embed/embedding": ("vocab", None)}, samples_per_step' in jax_text
    module = loops["torch"]["Bytes"]()
    theirs = TorchHolder(module, (), names=diloco_jax.torch.like_flax(module))
    ours = VariableHolder(loops["jax"]["Bytes"](nnx.Rngs(0)))
    assert theirs.shapes == {path: value.shape for path, value in ours.params.items()}
    assert theirs.axes == ours.axes | {"embed/embedding": ("vocab", None)}
