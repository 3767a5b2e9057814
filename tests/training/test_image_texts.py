"""Images with texts: what a run reads from folders and Parquet, against transformers' processor and literal files."""

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from diloco_jax.training.data import pictures
from diloco_jax.training.data.config import DataConfig, ImagesConfig, SourceConfig
from diloco_jax.training.data.corpus import Source, load_source, tokenizer_of
from diloco_jax.training.data.order import SampleOrder, check_source, eval_batches, example
from diloco_jax.training.data.pictures import PictureSource, list_pictures
from diloco_jax.training.data.sample import Sample, count_predicted, stack
from tests.extras import absent

Image = pytest.importorskip("PIL.Image", reason=absent("data"))

SOFT, SEQ_LEN = 6, 40
SPECIAL = ("<|image>", "<|image|>", "<image|>")
# One text has the image's place in it, and one is longer than a sample.
TEXTS = {f"{number:02}": f"a {word} one" for number, word in enumerate(["red", "blue", "green", "gold"] * 6)}
TEXTS["03"], TEXTS["05"] = "left <|image|> right", "long " * 30


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DILOCO_CACHE", str(tmp_path / "cache"))


def pixels_of(number: int) -> np.ndarray:
    rng = np.random.default_rng(number)
    return rng.integers(0, 256, (*rng.integers(20, 200, 2), 3), np.uint8)


def encoded(pixels: np.ndarray, format: str = "PNG", **options: Any) -> bytes:
    Image.fromarray(pixels).save(file := io.BytesIO(), format, **options)
    return file.getvalue()


def write_pairs(folder: Path) -> Path:
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / f"{name}.png").write_bytes(encoded(pixels_of(int(name))))
        (folder / f"{name}.txt").write_text(f"{text}\n")
    return folder


def write_table(folder: Path, *, as_csv: bool) -> Path:
    (folder / "images").mkdir(parents=True)
    rows = [{"file_name": f"images/{name}.png", "text": text} for name, text in TEXTS.items()]
    for name in TEXTS:
        (folder / "images" / f"{name}.png").write_bytes(encoded(pixels_of(int(name))))
    if as_csv:
        with (folder / "metadata.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, ["file_name", "text"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_parquet(folder: Path, names: list[str], *, struct: bool) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason=absent("data"))
    from pyarrow import parquet

    folder.mkdir()
    images: list[Any] = [encoded(pixels_of(int(name))) for name in names]
    if struct:
        images = [{"bytes": image, "path": None} for image in images]
    table = pyarrow.table({"image": images, "text": [TEXTS[name] for name in names], "id": names})
    parquet.write_table(table, folder / "train.parquet", row_group_size=5)
    (folder / "README.md").write_text("no image")
    return folder


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer like Gemma's: BPE with a begin-of-text token, where spaces are characters of words."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    names = ["<pad>", "<eos>", "<bos>", "<unk>", "<|image>", "<image|>", "<|image|>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=80, special_tokens=names, show_progress=False)
    made.train_from_iterator(TEXTS.values(), trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return folder


def config_of(path: Path, tokenizer: str | Path = "bytes", **images: Any) -> DataConfig:
    return DataConfig(
        format="images",
        path=str(path),
        tokenizer=str(tokenizer),
        held_out_fraction=0.25,
        images=ImagesConfig(**{"soft_tokens": SOFT, **images}),
    )


def load(path: Path, tokenizer: str | Path = "bytes", seq_len: int = SEQ_LEN, **images: Any) -> Source:
    return load_source(config_of(path, tokenizer, **images), seq_len)


def samples_of(source: Source) -> list[Sample]:
    return [part[number] for part in (source.train, source.held_out) for number in range(len(part))]


def equal(one: Sample, other: Sample) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.extra("parity")
def test_samples_are_those_of_transformers(tmp_path: Path) -> None:
    import transformers

    class Processor(transformers.Gemma4Processor):  # type: ignore[misc,name-defined]
        """The processor without the parts for sound and video, which need more packages."""

        def check_argument_for_proper_class(self, name: str, value: Any) -> None:
            pass

    folder = write_tokenizer(tmp_path / "tokenizer")
    special = dict(zip(("boi_token", "image_token", "eoi_token"), SPECIAL, strict=True))
    special |= {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
    words = {"eos_token": "<eos>", "bos_token": "<bos>", "pad_token": "<pad>", "extra_special_tokens": special}
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **words)
    processor = Processor(None, transformers.Gemma4ImageProcessorPil(), theirs, None)

    # The processor refuses other numbers of soft tokens than those of Gemma 4.
    soft_tokens, seq_len = 70, 88
    source = load(write_pairs(tmp_path / "pairs"), folder, seq_len, soft_tokens=soft_tokens)
    for sample, name in zip(samples_of(source), names_of(tmp_path / "pairs"), strict=True):
        text = TEXTS[name] if "<|image|>" in TEXTS[name] else f"<|image|>{TEXTS[name]}"
        options = {"max_soft_tokens": soft_tokens, "input_data_format": "channels_last"}
        expected = processor(text=[text], images=[[pixels_of(int(name))]], images_kwargs=options, return_tensors="np")
        ids = [*expected["input_ids"][0], theirs.eos_token_id][: seq_len + 1]
        np.testing.assert_array_equal(sample["tokens"][: len(ids)], ids)
        assert sample["segments"].tolist() == [1] * len(ids) + [0] * (seq_len + 1 - len(ids))
        assert not sample["tokens"][len(ids) :].any()
        np.testing.assert_array_equal(sample["patches"][0], np.rint(255 * expected["pixel_values"][0]))
        np.testing.assert_array_equal(sample["patch_positions"][0], expected["image_position_ids"][0])
    assert source.tokenizer and source.tokenizer.end == theirs.eos_token_id


def names_of(folder: Path) -> list[str]:
    pictures, _ = list_pictures(PictureSource(str(folder)))
    return [Path(each.name).stem for each in pictures()]


def test_all_forms_of_a_source_give_the_same_samples(tmp_path: Path) -> None:
    pairs = load(write_pairs(tmp_path / "pairs"))
    names = names_of(tmp_path / "pairs")
    assert sorted(names) == sorted(TEXTS) != names
    for struct in (True, False):
        table = load(write_parquet(tmp_path / f"parquet-{struct}", names, struct=struct))
        assert table.corpus == pairs.corpus
        assert all(map(equal, samples_of(table), samples_of(pairs)))
    by_text = {sample["tokens"].tobytes(): sample for sample in samples_of(pairs)}
    for as_csv in (True, False):
        listed = load(write_table(tmp_path / f"table-{as_csv}", as_csv=as_csv))
        mine = {sample["tokens"].tobytes(): sample for sample in samples_of(listed)}
        assert mine.keys() == by_text.keys() and len(samples_of(listed)) == len(TEXTS)


def test_bytes_are_tokens_and_the_image_has_ids_of_its_own(tmp_path: Path) -> None:
    source = load(write_pairs(tmp_path / "pairs"))
    names = names_of(tmp_path / "pairs")
    for sample, name in zip(samples_of(source), names, strict=True):
        soft = int((sample["patch_positions"][0, :, 0] >= 0).sum()) // 9
        before, _, after = TEXTS[name].rpartition("<|image|>")
        ids = [*before.encode(), 256, *[257] * soft, 258, *after.encode(), 0][: SEQ_LEN + 1]
        assert sample["tokens"][: len(ids)].tolist() == ids and 1 <= soft <= SOFT
    tokenizer = source.tokenizer
    assert tokenizer is not None and source.vocab_size == tokenizer.vocab_size == 259
    sample = samples_of(source)[names.index("00")]
    assert tokenizer.bytes_of(sample) == len(TEXTS["00"]) + 1
    # The end of the image and the text with its own end are predicted.
    assert count_predicted(stack([sample])) == 1 + len(TEXTS["00"]) + 1
    assert tokenizer.decode(sample["tokens"]).rstrip("\0") == TEXTS["00"]
    assert tokenizer_of(config_of(tmp_path / "pairs")) == tokenizer


def test_a_trained_tokenizer_has_the_special_tokens(tmp_path: Path) -> None:
    source = load(write_pairs(tmp_path / "pairs"), "train:300")
    assert source.tokenizer is not None
    ids = [source.tokenizer.made.token_to_id(name) for name in SPECIAL]
    sample = samples_of(source)[names_of(tmp_path / "pairs").index("00")]
    assert sample["tokens"][0] == ids[0] and ids[2] in sample["tokens"]
    assert load(tmp_path / "pairs", "train:300").corpus == source.corpus


def test_the_order_is_cut_among_islands_and_is_the_same_after_a_restart(tmp_path: Path) -> None:
    config = config_of(write_pairs(tmp_path / "pairs"))
    whole = SampleOrder(load_source(config, SEQ_LEN), 3).batch(((0, 24),))
    # Each island opens the data itself, and one of them resumes after two of its samples.
    parts = [SampleOrder(load_source(config, SEQ_LEN), 3).batch(ends) for ends in (((0, 6),), ((6, 8), (12, 18)))]
    again = SampleOrder(load_source(config, SEQ_LEN), 3).batch(((8, 12), (18, 24)))
    joined = {
        name: np.concatenate((parts[0][name], parts[1][name][:2], again[name][:4], parts[1][name][2:], again[name][4:]))
        for name in whole
    }
    assert equal(joined, whole)
    # An epoch of 18 samples has each of them once, and no held-out one.
    epoch = {row.tobytes() for row in whole["patches"][:18]}
    held_out = {sample["patches"].tobytes() for sample in samples_of(load_source(config, SEQ_LEN))[18:]}
    assert len(epoch) == 18 and len(held_out) == 6 and not epoch & held_out


def test_every_batch_has_the_shapes_of_the_example(tmp_path: Path) -> None:
    config = config_of(write_pairs(tmp_path / "pairs"))
    check_source(config, SEQ_LEN, 4)
    batch, like = next(eval_batches(load_source(config, SEQ_LEN), 4, 1)), example(config, SEQ_LEN)
    assert {name: (value.shape[1:], value.dtype) for name, value in batch.items()} == {
        name: (value.shape, value.dtype) for name, value in like.items()
    }
    assert batch["patches"].shape == (4, 1, 9 * SOFT, 768)


def test_texts_without_images_fit_into_the_batches(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("words without an image\n" * 200)
    config = DataConfig(
        mixture={
            "seen": SourceConfig(path=str(write_pairs(tmp_path / "pairs")), format="images"),
            "read": SourceConfig(path=str(text), format="text"),
        },
        tokenizer="bytes",
        held_out_fraction=0.25,
        images=ImagesConfig(soft_tokens=SOFT),
    )
    source = load_source(config, SEQ_LEN)
    batch = SampleOrder(source, 0).batch(((0, 8),))
    without = (batch["patch_positions"] == -1).all(axis=(1, 2, 3))
    assert without.sum() == 4 and not batch["patches"][without].any() and batch["segments"][without].all()
    assert not (batch["tokens"][without] == 257).any() and (batch["tokens"][~without] == 257).any(axis=1).all()
    assert source.vocab_size == 259 and source.tokenizer and source.tokenizer.vocab_size == 259


def test_images_are_upright_and_in_three_colours(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    grey, turned = Image.new("L", (60, 96), 100), Image.fromarray(np.zeros((96, 48, 3), np.uint8))
    grey.save(folder / "grey.webp", lossless=True)
    exif = Image.Exif()
    # The camera was turned by a quarter.
    exif[0x0112] = 6
    turned.save(folder / "turned.JPG", exif=exif)
    for name in ("grey", "turned"):
        (folder / f"{name}.txt").write_text(name)
    found = {each.name: pictures.decode(each.read()) for each in list_pictures(PictureSource(str(folder)))[0]()}
    assert (found["grey.webp"] == 100).all() and found["grey.webp"].shape == (96, 60, 3)
    assert found["turned.JPG"].shape == (48, 96, 3)


def test_broken_images_are_refused_by_name_or_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "PIXELS_MAX", 50_000)
    monkeypatch.setattr(pictures, "SIDE_MAX", 2_000)
    monkeypatch.setattr(pictures, "FILE_BYTES_MAX", 200_000)
    folder, whole = write_pairs(tmp_path / "some"), load(write_pairs(tmp_path / "all"))
    deep = io.BytesIO()
    Image.fromarray(np.full((9, 9), 40_000, np.uint16)).save(deep, "PNG")
    harm = {
        "cut.png": (encoded(pixels_of(1))[:-500], "truncated"),
        "text.png": (b"not an image", "12 bytes do not begin a PNG"),
        "empty.jpg": (b"", "its 0 bytes do not begin a PNG"),
        # The few bytes of this image decompress to more pixels than the limit.
        "bomb.png": (encoded(np.zeros((300, 300, 3), np.uint8)), "300 x 300 = 90,000 pixels, the limit is 50,000"),
        "strip.png": (encoded(np.zeros((1, 3000, 3), np.uint8)), "3000 x 1 pixels, and the limit of a side is 2,000"),
        "large.png": (encoded(pixels_of(1)) + bytes(200_000), "bytes, and the limit is 200,000"),
        "deep.png": (deep.getvalue(), "mode I;16; convert it to 8 bits"),
        "film.webp": (b"GIF89a" + bytes(40), "do not begin a PNG"),
    }
    for name, (data, why) in harm.items():
        (folder / name).write_bytes(data)
        (folder / name).with_suffix(".txt").write_text("a picture")
        with pytest.raises(ValueError, match=f"has 1 broken images, such as {name}: .*{why}") as error:
            load(folder)
        assert "set data.images.broken to skip" in str(error.value)
        left = load(folder, broken="skip")
        assert left.corpus == whole.corpus and left.store and left.store.facts["broken"] == 1
        (folder / name).unlink()


def test_texts_that_cannot_be_used_are_one_error(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "pairs")
    (folder / "00.txt").write_text("a <|image|> and <|image|>")
    with pytest.raises(ValueError, match=r"the text of 00.png cannot be used: it has <\|image\|> 2 times"):
        load(folder)
    (folder / "00.txt").write_text(" \n")
    left = load(folder)
    assert len(samples_of(left)) == len(TEXTS) - 1 and left.store and left.store.facts["rows_left_out"] == 1
    (folder / "00.txt").unlink()
    with pytest.raises(ValueError, match=r"00.png has no text, like 0 other images of 24: write 00.txt beside it"):
        load(folder)
    (folder / "metadata.jsonl").write_text(
        '{"file_name": "01.png", "text": "x"}\n{"file_name": "../x.png", "text": ""}'
    )
    with pytest.raises(ValueError, match=r"metadata.jsonl, row 2 names ../x.png, which is not there"):
        load(folder)
    (folder / "metadata.jsonl").write_text('{"file_name": "01.png", "caption": "x"}\n')
    with pytest.raises(ValueError, match="row 1 has file_name, caption; it needs file_name and 'text'"):
        load(folder)
    (folder / "metadata.jsonl").write_text("{")
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        load(folder)
    with pytest.raises(ValueError, match=r"has no .png"):
        load_source(config_of(tmp_path / "cache"), SEQ_LEN)


def test_patterns_in_names_are_only_names(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "pairs")
    for name, text in {"[0]": "brackets", "*": "star", "?": "mark", "a": "letter"}.items():
        (folder / f"{name}.png").write_bytes(encoded(pixels_of(0)))
        (folder / f"{name}.txt").write_text(text)
    found = {each.name: each.text for each in list_pictures(PictureSource(str(folder)))[0]()}
    assert found == {f"{name}.png": text for name, text in TEXTS.items()} | {
        "[0].png": "brackets", "*.png": "star", "?.png": "mark", "a.png": "letter"
    }  # fmt: skip


@pytest.mark.parametrize("name", ["a.png", "a.txt", "metadata.jsonl"])
def test_files_that_cannot_be_read_or_never_end_are_refused(tmp_path: Path, name: str) -> None:
    folder = write_pairs(tmp_path / "pairs")
    (folder / "a.png").write_bytes(encoded(pixels_of(0)))
    (folder / "a.txt").write_text("a text")
    (folder / name).unlink(missing_ok=True)
    for target in ("/nowhere", "/dev/zero", name):
        (folder / name).symlink_to(target)
        with pytest.raises(ValueError, match=f"'{name}' of '.*' is a broken link, a pipe or a device; remove it"):
            list_pictures(PictureSource(str(folder)))
        (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ValueError, match=f"'{name}' of '.*' is a broken link, a pipe or a device; remove it"):
        list_pictures(PictureSource(str(folder)))


def test_long_texts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "TEXT_MAX", 100)
    folder = write_pairs(tmp_path / "pairs")
    (folder / "00.txt").write_text("x" * 101)
    # No text was read yet.
    with pytest.raises(ValueError, match=r"the text of 00.txt has a length of 101, and the limit is 100; shorten it"):
        list_pictures(PictureSource(str(folder)))
    (folder / "metadata.jsonl").write_text(json.dumps({"file_name": "01.png", "text": "x" * 101}))
    with pytest.raises(ValueError, match=r"metadata.jsonl, row 1 has a length of 101, and the limit is 100"):
        load(folder)


def test_damaged_texts_of_tables_are_refused(tmp_path: Path) -> None:
    folder = write_table(tmp_path / "table", as_csv=True)
    (folder / "metadata.csv").write_text('file_name,text\nimages/00.png,"' + "x\n" * 100_000)
    with pytest.raises(ValueError, match=r"metadata.csv is not CSV at line 1: field larger .*; correct it"):
        load(folder)
    pyarrow = pytest.importorskip("pyarrow", reason=absent("data"))
    from pyarrow import parquet

    # Arrow writes what is not UTF-8 as text.
    text = pyarrow.array([b"\xff"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"image": [b"x"], "text": text}), folder / "train.parquet")
    with pytest.raises(ValueError, match=r"train.parquet has text that is not UTF-8: .*; write it again as UTF-8"):
        load(folder)


def test_a_table_without_the_columns_is_refused(tmp_path: Path) -> None:
    folder = write_parquet(tmp_path / "parquet", list(TEXTS), struct=True)
    with pytest.raises(
        ValueError, match=r"has columns image, text, id, not 'picture'; name the image's in data.images"
    ):
        load(folder, column="picture")
    with pytest.raises(ValueError, match="row 0 has str as 'id'; it must be the bytes of an image"):
        load(folder, column="id")
    (folder / "train.parquet").write_bytes(b"PAR1 and more")
    with pytest.raises(ValueError, match=r"train.parquet cannot be read as Parquet"):
        load(folder)


def test_tokenizers_without_the_tokens_are_refused(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "pairs")
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(ValueError, match=r"no special token <img> for images; name such tokens of it in data.images"):
        load(folder, tokenizer, image_token="<img>")
    with pytest.raises(ValueError, match="give three different ones"):
        ImagesConfig(begin_token="<|image|>")
    with pytest.raises(ValueError, match="soft_tokens is 0"):
        ImagesConfig(soft_tokens=0)
    with pytest.raises(ValueError, match=r"needs data.tokenizer"):
        DataConfig(format="images", path=str(folder))


def test_a_sample_that_cannot_hold_the_image_is_refused(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "pairs")
    # "left " is 5 bytes, then the begin, the soft tokens and the end of the image.
    need = 5 + 1 + SOFT + 1
    with pytest.raises(ValueError, match=rf"train.seq_len is {need - 1}, but 03.png needs at least {need} for"):
        load(folder, seq_len=need - 1)
    assert len(samples_of(load(folder, seq_len=need))) == len(TEXTS)


def test_a_damaged_store_is_refused(tmp_path: Path) -> None:
    source = load(write_pairs(tmp_path / "pairs"))
    assert source.store is not None
    path = source.store.folder / "images.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"images.bin is missing or cut; remove the folder"):
        load(tmp_path / "pairs")
    (path.parent / "images.json").write_text('{"documents": "many"}')
    with pytest.raises(ValueError, match=r"images.json is damaged \(KeyError\('tokenizer'\)\); remove the folder"):
        load(tmp_path / "pairs")
