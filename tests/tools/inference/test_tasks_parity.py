"""Harness against lm-eval's own backend for transformers, on the same folders: tokens, likelihoods and answers."""

import copy
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from diloco_jax.cli import main as cli
from diloco_jax.runtime.model.evaluation import RunModel
from diloco_jax.settings.text import load
from diloco_jax.tools.inference.language import Language
from diloco_jax.training.data.tokenizer import open_tokenizer
from tests.extras import absent
from tests.tools.export.folders import model_of, public

torch = pytest.importorskip("torch", reason=absent("parity"))
transformers = pytest.importorskip("transformers", reason=absent("parity"))
pytest.importorskip("lm_eval", reason=absent("parity"))

pytestmark = [
    pytest.mark.extra("parity"),
    pytest.mark.usefixtures("quick_compiler"),
    # Their libraries warn about themselves.
    pytest.mark.filterwarnings("default"),
]

# One program of 32 tokens is enough for all rows. The tokenizers have fewer ids than the model.
CONTEXT, MODEL_IDS, IDS = 32, 320, 310
TEXT = ["the quick brown fox jumps over the lazy dog, and it isn't late;\n the dog = 12 * 3.5 'words' in a text\n"]
CHAT = "<|im_start|>user\nthe dog<|im_end|>\n<|im_start|>assistant\n"


SPECIAL = [
    ("", "the dog"), ("", " the dog"), ("", "</s>the dog"), ("", "<s>the dog"), ("", "\n"), ("the ", "dog"),
    ("the  ", "dog"), ("the\n\n", "dog"), ("the\t", " dog"), ("the dog", "</s>"), ("the dog", " <s>late</s>"),
    ("the dog", "<|im_end|>\n"), (CHAT, "it is late"), (CHAT, "it<|im_end|>"), ("<s>the dog", " is"),
    ("</s>the dog", " is"), ("<s> the", " dog</s>"), ("\u00e9t\u00e9 \u4f60\u597d", " \U0001f642 na\u00efve"),
    ("the\u00a0", "dog"), ("the \u2003", "\u00e9"), ("the", "e"), ("2 *", " 3"), ("2 *", " 4"),
    ("the dog " * 30, "is late"), ("fox" * 40, " the lazy dog, and it is late"), ("x", " y z" * 7),
    ("<s>" * 3, "the"), ("dog " * 12 + "</s>", "dog"), ("the<unk>", "dog"), (" the", " dog"),
]  # fmt: skip


def trained(special: list[str], *, metaspace: bool = False) -> tokenizers.Tokenizer:
    """A BPE tokenizer; of bytes, or of words that begin with a metaspace and fall back to bytes."""
    if metaspace:
        made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        made.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        special = ["<unk>", *special, *(f"<0x{byte:02X}>" for byte in range(256))]
        alphabet = []
    else:
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=IDS, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXT * 3, trainer)
    content = json.loads(made.to_str())
    # Bytes are tokens like others, not special ones.
    content["added_tokens"] = [one for one in content["added_tokens"] if not one["content"].startswith("<0x")]
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def around(made: tokenizers.Tokenizer, single: str) -> tokenizers.Tokenizer:
    names = [name for name in single.split() if name != "$A"]
    made.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(name, made.token_to_id(name)) for name in names]
    )
    return made


KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    # As in GPT-2, the begin token is only before texts without context.
    "plain": ({"bos_token": "</s>"}, lambda: trained(["<s>", "</s>"])),
    "begin": ({"bos_token": "<s>"}, lambda: around(trained(["</s>", "<s>"]), "<s> $A")),
    "both": ({"bos_token": "<s>"}, lambda: around(trained(["<s>", "</s>"]), "<s> $A </s>")),
    "end": ({}, lambda: around(trained(["<s>", "</s>"]), "$A </s>")),
    "chat": (
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None},
        lambda: trained(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    ),
    "metaspace": (
        {"bos_token": "<s>", "unk_token": "<unk>"},
        lambda: around(trained(["<s>", "</s>"], metaspace=True), "<s> $A"),
    ),
}


# Their backend judges the tokens that a tokenizer puts behind every text, in place of the answer. So it gets the same
# tokenizer without them.
WITHOUT_END = {
    "both": lambda: around(trained(["<s>", "</s>"]), "<s> $A"),
    "end": lambda: trained(["<s>", "</s>"]),
}


def write_tokenizer(folder: Path, kind: str, *, ends: bool = True) -> None:
    settings, make = KINDS[kind]
    make = make if ends else WITHOUT_END.get(kind, make)
    folder.mkdir(exist_ok=True)
    make().save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


@pytest.fixture(scope="module")
def single_thread() -> Iterator[None]:
    """Programs of this size take longer with several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models_of_both(
    tmp_path_factory: pytest.TempPathFactory, quick_compiler: None, single_thread: None
) -> tuple[Language, Any]:
    """The same folder in both: ours by way of `diloco import`."""
    folder = tmp_path_factory.mktemp("both") / "model"
    public(folder, model_of(vocab_size=MODEL_IDS, tie_embeddings=False))
    write_tokenizer(folder, "begin")
    # The likeliest tokens are text, so that their texts have them again.
    values = load_file(folder / "model.safetensors")
    made = open_tokenizer(folder)
    texts = [made.decode([id]) for id in range(MODEL_IDS)]
    values["lm_head.weight"][[not (text and text.isascii() and text.isprintable()) for text in texts]] = 0
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    base, out = folder.parent / "base.yaml", folder.parent / "model.yaml"
    base.write_text(json.dumps({"data": {"format": "text", "path": "texts"}, "train": {"seq_len": CONTEXT}}))
    assert cli.main(["import", str(folder), "--config", str(base), "--out", str(out)]) == 0
    config = load(str(out))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Language(config, dict(RunModel(config).initial_parameters())), theirs


def asked(method: Any, rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=method, doc={}, arguments=row, idx=number) for number, row in enumerate(rows)]


class Both(NamedTuple):
    """Our harness and their backend with the tokenizer of a folder; all tokenizers share the model."""

    kind: str
    folder: Path
    ours: Any
    theirs: Any

    def answers(self, method: str, rows: Iterable[tuple[Any, ...]]) -> tuple[Any, Any]:
        questions = asked(method, rows)
        ours, theirs = (getattr(one, method)(questions, disable_tqdm=True) for one in (self.ours, self.theirs))
        return ours, theirs

    def pairs(self) -> list[tuple[str, str]]:
        """40 contexts with answers: what is special, the likeliest tokens, and drawn words."""
        draw, found = random.Random(self.kind), [*SPECIAL]
        words = [*TEXT[0].split(" "), "\u00df", "<s>", "</s>", "  ", "\n"]
        while len(found) < 40:
            given, answer = (" ".join(draw.choices(words, k=draw.randint(1, most))) for most in (14, 4))
            if len(found) % 2:
                ids = self.theirs.tok_encode(given)[-CONTEXT:]
                answer = self.theirs.tok_decode([int(self.theirs.model(torch.tensor([ids])).logits[0, -1].argmax())])
            # They refuse an answer without a separate token.
            if self.theirs._encode_pair(given, answer)[1]:
                found.append((given, answer))
        return found


@pytest.fixture(scope="module", params=KINDS)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, models_of_both: tuple[Language, Any]
) -> Both:
    from lm_eval.models.huggingface import HFLM

    from diloco_jax.tools.inference.harness import Harness

    folder = tmp_path_factory.mktemp(request.param)
    write_tokenizer(folder, request.param)
    write_tokenizer(folder / "theirs", request.param, ends=False)
    language = copy.copy(models_of_both[0])
    language.tokenizer = open_tokenizer(folder)
    # With its cache, the likelihood of an answer of one token depends on the other questions.
    how: dict[str, Any] = {"max_length": CONTEXT, "batch_size": 16, "logits_cache": False}
    return Both(
        request.param, folder, Harness(language), HFLM(models_of_both[1], tokenizer=str(folder / "theirs"), **how)
    )


def test_pairs_have_their_tokens_and_likelihoods(both: Both) -> None:
    assert both.ours.prefix_token_id == both.theirs.prefix_token_id
    assert both.ours.eot_token_id == both.theirs.eot_token_id
    # A prompt of `diloco sample` gets a begin token even if its text starts with one, as in transformers.
    for text in ("the dog", "<s>the dog", ""):
        assert open_tokenizer(both.folder).encode(text) == both.theirs.tokenizer.encode(text)
    pairs = both.pairs()
    for given, answer in pairs:
        ours, theirs = (
            one._encode_pair(given, answer) if given else one.tok_encode(answer, add_special_tokens=False)
            for one in (both.ours, both.theirs)
        )
        assert ours == theirs, (given, answer)
    found, wanted = both.answers("loglikelihood", pairs)
    np.testing.assert_allclose([value for value, _ in found], [value for value, _ in wanted], atol=1e-4, rtol=0)
    assert [likeliest for _, likeliest in found] == [likeliest for _, likeliest in wanted]
    assert any(likeliest for _, likeliest in wanted)


def test_texts_of_several_windows_have_their_likelihoods(both: Both) -> None:
    texts = ("the dog", "<s>the dog", "</s>the dog", CHAT * 3, TEXT[0] * 2, "\u4f60\u597d " * 9, " ")
    found, wanted = both.answers("loglikelihood_rolling", ((text,) for text in texts))
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=0)


def test_greedy_answers_are_theirs(both: Both) -> None:
    for text in ("the dog", "2 * ", "\u4f60", TEXT[0], CHAT * 2, "the dog</s>"):
        # One at a time: in a batch of theirs, the first text decides whether all get a begin token.
        how = {"until": ["\n"], "max_gen_toks": 8}
        (found,) = both.ours.generate_until(asked("generate_until", [(text, how)]), disable_tqdm=True)
        (wanted,) = both.theirs.generate_until(asked("generate_until", [(text, how)]), disable_tqdm=True)
        # They decode an answer without its prompt, so they lose the first space of a metaspace.
        assert found.removeprefix(" ") == wanted.removeprefix(" "), text
