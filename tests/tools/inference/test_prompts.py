"""Text about images by a model of a run, against the model's own logits without a cache; and what is refused."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from diloco_jax.cli import main as cli
from diloco_jax.runtime.model.evaluation import Evaluator
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import parse
from diloco_jax.tools.inference.language import Language, Writing
from diloco_jax.tools.inference.prompt import prompt_of
from diloco_jax.training.data.images import cut_image
from diloco_jax.training.data.tokenizer import open_tokenizer
from diloco_jax.training.models.config import SEEING_DECODER
from diloco_jax.training.models.protocol import join_model, load_model, split_model
from tests.extras import absent
from tests.runtime.helpers import SMALL, merged

pillow = pytest.importorskip("PIL.Image", reason=absent("data"))

BEGIN, IMAGE, END = 256, 257, 258
ARGS: dict[str, Any] = {
    "vocab_size": 260, "dim": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "mlp_dim": 24,
    "seq_len_max": 64, "image_token": IMAGE, "image_begin": BEGIN, "image_end": END,
    "pattern": ["local", "global"], "kinds": {"local": {"window": 8, "see_images": True}, "global": {}},
    "tower": {"dim": 16, "num_layers": 1, "num_heads": 2, "head_dim": 8, "mlp_dim": 24, "positions": 16},
}  # fmt: skip


def values_of(folder: Path, module: str = SEEING_DECODER, **args: Any) -> dict[str, Any]:
    (folder / "text").write_text("some text of no importance\n" * 2000)
    data = {"path": str(folder / "text"), "images": {"soft_tokens": 6}}
    return {
        **merged(SMALL, {"train": {"seq_len": 64}, "data": data}),
        "model": {"module": module, "args": args or ARGS},
    }


def config_of(folder: Path, module: str = SEEING_DECODER, **args: Any) -> RunConfig:
    return parse(values_of(folder, module, **args), "the test")


def images_in(folder: Path) -> list[Path]:
    """A wide image, with 5 x 1 soft tokens, and a nearly square one with 2 x 2."""
    rng = np.random.default_rng(0)
    for name, shape in (("wide.png", (40, 230, 3)), ("square.jpg", (90, 80, 3))):
        pillow.fromarray(rng.integers(0, 256, shape, np.uint8)).save(folder / name)
    return [folder / "wide.png", folder / "square.jpg"]


def test_what_it_writes_about_images_is_likeliest(tmp_path: Path) -> None:
    config, files, rng = config_of(tmp_path), images_in(tmp_path), np.random.default_rng(3)
    drawn = dict(Evaluator(config).initial_parameters())
    parameters = {path: np.float32(value + 0.2 * rng.normal(size=value.shape)) for path, value in drawn.items()}
    written = "".join(Language(config, parameters).write("a<|image|>bc<|image|>d", 20, Writing(), files))

    cut = [cut_image(np.asarray(pillow.open(file).convert("RGB")), 6) for file in files]
    places = [[BEGIN, *[IMAGE] * one.soft_tokens, END] for one in cut]
    ids = [ord("a"), *places[0], *b"bc", *places[1], ord("d")]
    arrays = {
        "patches": jnp.asarray(np.stack([one.pixels for one in cut])[None]),
        "patch_positions": jnp.asarray(np.stack([one.positions for one in cut])[None]),
    }
    graphdef, _ = split_model(load_model(SEEING_DECODER, ARGS, 0))
    model: Any = join_model(graphdef, {path: jnp.asarray(value) for path, value in parameters.items()})
    program = jax.jit(lambda tokens: model(tokens, **arrays))
    for _ in range(20):  # over two pieces
        tokens = np.int32([ids + [0] * (64 - len(ids))])
        ids.append(int(np.asarray(program(tokens))[0, len(ids) - 1, :256].argmax()))
    assert written == bytes(ids[-20:]).decode(errors="replace")


def test_images_are_where_the_text_has_them_or_before_it(tmp_path: Path) -> None:
    config, files, tokenizer = config_of(tmp_path), images_in(tmp_path), open_tokenizer("bytes")
    ids, arrays = prompt_of(config, tokenizer, "x", files)
    first, second = ([BEGIN, *[IMAGE] * count, END] for count in (5, 4))
    assert ids == [*first, *second, ord("x")]
    assert prompt_of(config, tokenizer, "x<|image|>", files[:1]).ids == [ord("x"), *first]
    assert {name: value.shape for name, value in arrays.items()} == {
        "patches": (1, 2, 54, 768), "patch_positions": (1, 2, 54, 2)
    }  # fmt: skip


def test_what_cannot_be_seen_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, files, tokenizer = config_of(tmp_path), images_in(tmp_path), open_tokenizer("bytes")
    (tmp_path / "broken.png").write_bytes(files[0].read_bytes()[:200])
    plain = {**SMALL["model"]["args"], "seq_len_max": 64}
    decoder = config_of(tmp_path, "diloco_jax.training.models.decoder:Decoder", **plain)
    other = config_of(tmp_path, **{**ARGS, "tower": {**ARGS["tower"], "patch_size": 8}})
    for run, text, given, message in (
        (decoder, "x", files, r"--image needs a model with a vision tower, but .*:Decoder'; import Gemma 4 with"),
        (other, "x", files, r"tower has patch_size 8 and pool 3, but images are cut into patches of 16"),
        (config, "x", [tmp_path / "no.png"], r"no.png cannot be read: No such file or directory; correct the path"),
        (config, "x", [tmp_path / "broken.png"], r"broken.png cannot be used: it is not a whole PNG"),
        (config, "x", [Path("/dev/zero")], r"/dev/zero cannot be used: it has 67,108,865 bytes, and the limit is"),
        (config, "<|image|>x", files, r"have the image token 1 times \(id 257, .*, but there are 2 images"),
    ):
        with pytest.raises(ValueError, match=message):
            prompt_of(run, tokenizer, text, given)
    language = Language(config, dict(Evaluator(config).initial_parameters()))
    with pytest.raises(ValueError, match=r"has 8 tokens with its images, and 60 more .* leaves room for 49"):
        next(language.write("x", 60, Writing(), files[:1]))
    # The command passes files and text on, and prints what is wrong.
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values_of(tmp_path)))
    assert cli.main(["sample", str(path), "--image", *map(str, files), "--prompt", "x", "--tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("x")
    assert cli.main(["sample", str(path), "--image", str(tmp_path / "no.png"), "--tokens", "5"]) != 0
    assert "no.png cannot be read" in capsys.readouterr().err
