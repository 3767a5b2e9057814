"""The catalogue of wrong inputs: each with the value, the limit and the remedy that its one line of error must name.

FOUND is what `diloco doctor` finds before the run, SETTINGS is wrong in a config, WORDS on a command line (words.txt, a
row in a line). Paths are in the folder that `tests/cli/test_catalogue.py` makes.
"""

from pathlib import Path
from typing import Any, NamedTuple

from diloco_jax.runtime.records.signals import FAILED, WRONG_INPUT
from diloco_jax.training.models.config import DECODER, MOE


class Wrong(NamedTuple):
    """A wrong input."""

    given: dict[str, Any] | str  # changes of the small config; the text of a config; or the words of a command line
    value: str
    limit: str
    remedy: str
    status: int = WRONG_INPUT


DROPLESS = {"module": MOE, "args": {"routing": "dropless"}}
BUILT_IN = {"module": DECODER, "args": {}}
RULES = {"embd": ["fsdp"]}
MIXED = {"mlp": 4, "rest": 24}
OWN = "wrong_models:"
TLS = {"tls_ca": "certs/ca.pem", "tls_certificate": "certs/{name}.pem", "tls_key": "certs/{name}.key"}
LATE = {"tls_certificate": "certs/late.pem", "tls_key": "certs/late.key"}
AWAY = {"address": "no-such-host.invalid:7000", "allow_plaintext": True}
TEXT = {"format": "text", "path": "some.txt"}
GROWING = [f"&{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in zip("abcde", "bcdef", strict=True)]
BOMB = f"seed: [&a [1, 1], {', '.join(GROWING)}]\n"  # 66,430 pairs, if somebody wrote them out

FOUND = (
    Wrong("train:\n  stepz: 5\n", "train.stepz (value 5)", "unknown setting", "did you mean train.steps?"),
    Wrong("train: {steps: 5}\nseed: [1,\n", "config.yaml", "not valid YAML, line 3", "correct it there"),
    Wrong({"train": {"steps": "many"}}, "train.steps is 'many'", "a valid integer", "it must be"),
    Wrong({"data": {"path": "/no/data"}}, "data.path '/no/data'", "does not exist", "give a file, a folder"),
    Wrong({"data": {"path": ".", "patterns": ["*.no"]}}, "data.path '.'", "no file that matches", "correct data.patt"),
    Wrong({"data": {"path": "short.txt"}}, "short.txt' has 401 tokens", "windows of 32", "give more text"),
    Wrong({"data": {"path": "some.txt"}}, "6 held-out windows", "no batch of 16", "lower train.eval_batch_size"),
    Wrong({"data": {**TEXT, "tokenizer": "damaged"}}, "damaged/tokenizer.json", "is damaged", "take it again from"),
    Wrong({"data": {"format": "store", "path": "empty"}}, "/empty'", "is no token store", "see diloco tokenize"),
    Wrong({"data": {"format": "store", "path": "old"}}, "old/store.json has version 0", "reads 1", "make the store"),
    Wrong({"transport": {"address": "TAKEN"}}, "transport.address TAKEN", "in use", "choose another one"),
    Wrong({"syncer": {"metrics": "TAKEN"}}, "syncer.metrics TAKEN", "in use", "choose another one"),
    Wrong({"transport": AWAY}, "transport.address no-such-host.invalid:7000", "cannot listen on", "use an address of"),
    Wrong({"transport": {"address": "0.0.0.0:0"}}, "'0.0.0.0:0'", "is not loopback", "set transport.allow_plaintext"),
    Wrong({"transport": {"token_file": "none"}}, "transport.token_file none", "cannot be read", "correct the path"),
    Wrong({"transport": {"token_file": "nil"}}, "transport.token_file nil", "is empty", "write a secret into it"),
    Wrong({"transport": TLS | {"tls_key": "none"}}, "transport.tls_key none", "cannot be read", "`diloco certs`"),
    Wrong({"transport": TLS | LATE}, "certs/late.pem", "expired on 2020-01-02", "make a new one", FAILED),
    Wrong({"transport": TLS | {"tls_ca": "theirs/ca.pem"}}, "tls_ca is theirs/ca.pem", "not signed by", "use the file"),
    Wrong({"trackers": ["wandbb"]}, "trackers has 'wandbb'", "wandb, trackio, mlflow", "did you mean wandb?"),
    Wrong({"islands": {"topology": "v5p:2x2x1", "devices": "auto"}}, "v5p:2x2x1", "no TPU", "or run on a host of that"),
    Wrong({"callbacks": ["nowhere:Told"]}, "callbacks 'nowhere:Told'", "cannot be imported", "install or correct it"),
    Wrong({"islands": {"command": ["nowhere"]}}, "islands.command 'nowhere'", "no program here", "name one, such as"),
    Wrong({"optimizer": {"warmup_steps": 100}}, "warmup_steps 100", "80 global steps", "lower warmup_steps"),
    Wrong({"model": BUILT_IN | {"weights": "none"}}, "none/config.json", "cannot be read", "name the folder of a pub"),
)
FIRST = 20  # of these at least, doctor finds

SETTINGS = (
    Wrong("- 1\n- 2\n", "holds a list", "it must be a mapping", "such as 'train: {...}'"),
    Wrong("\udc89PNG", "config.yaml is not UTF-8", "invalid start byte", "name a YAML file, or a config"),
    Wrong("name: a\0b\n", "config.yaml", "#x0000", "correct it there"),
    Wrong("a: " + "x" * (1 << 20), "config.yaml has more than", "1048576 bytes, the limit", "name a YAML file, or a"),
    Wrong("train:\n\tsteps: 5\n", "'\\t'", "not valid YAML, line 2", "correct it there"),
    Wrong("train: {steps: 5}\ntrain: {seq_len: 6}\n", "train is there twice", "not valid YAML, line 2", "correct it"),
    Wrong("seed: " + "[" * 2000, "config.yaml is not valid YAML", "recursion depth", "correct it there"),
    Wrong("seed: 2020-13-45\n", "config.yaml is not valid YAML", "month must be in 1..12", "correct it there"),
    Wrong("seed: " + "1" * 5000, "config.yaml is not valid YAML", "limit (4300 digits)", "correct it there"),
    Wrong("name: !!python/object/apply:os.system [ls]\n", "os.system", "not valid YAML, line 1", "correct it there"),
    Wrong(BOMB, "seed is [[1, 1], [[...], [...]", "a valid integer", "it must be"),
    Wrong("rate: 3\n", "rate (value 3)", "unknown setting", "known are name, runs_dir"),
    Wrong("trian: {steps: 5}\n", "trian (value {'steps': 5})", "unknown setting", "did you mean train?"),
    Wrong("train:\n", "train is None", "it is a section", "write its settings below it"),
    Wrong({"train": 7}, "train is 7", "it is a section", "write its settings below it"),
    Wrong({"train": {"steps": True}}, "train.steps is true", "a number", "it must be"),
    Wrong({"train": {"steps": 2.5}}, "train.steps is 2.5", "a valid integer", "it must be"),
    Wrong({"train": {"steps": 0}}, "train.steps is 0", "10^18", "it must be at least 1"),
    Wrong({"train": {"steps": 10**24}}, "train.steps is 1000000000000000000000000", "10^18", "it must be at least 1"),
    Wrong({"train": {"tokens": -5}}, "train.tokens is -5", "1 to 10^18", "0 for a run of train.steps"),
    Wrong({"train": {"tokens": 255}}, "train.tokens is 255", "the 256 of one global step", "raise it"),
    Wrong({"train": {"tokens": 81 * 256}}, "train.steps 80", "takes 81 global steps", "set train.steps to 0"),
    Wrong({"train": {"steps": 0, "tokens": 1025}, "optimizer": {"warmup_steps": 6}}, "warmup_steps 6", "5 gl", "lower"),
    Wrong({"train": {"seq_len": 9999}, "model": BUILT_IN}, "seq_len is 9999", "seq_len_max", "or lower train.seq_len"),
    Wrong({"train": {"batch_size": 7}}, "batch_size is 7", "2 islands cannot share", "use a multiple of islands.count"),
    Wrong({"name": "a/b"}, "name is 'a/b'", "1 to 100 characters", "use a plain word"),
    Wrong({"name": "\u202etxt"}, "name is '\\u202etxt'", "1 to 100 characters", "use a plain word"),
    Wrong({"name": "x" * 101}, "name is 'xxx", "1 to 100 characters", "use a plain word"),
    Wrong("name: 2020-01-01\n", "name is datetime.date(2020, 1, 1)", "text", "in quotes"),
    Wrong({"trackers": "wandb"}, "trackers is 'wandb'", "it must be a list", "such as [a, b]"),
    Wrong({"seed": -1}, "seed is -1", "[0, 2^31)", "it must be in"),
    Wrong({"adopt": {"mode": "rebasee"}}, "adopt.mode is 'rebasee'", "'blend' or 'rebase'", "did you mean rebase?"),
    Wrong({"wire": {"up": "int3"}}, "wire.up is 'int3'", "'float32', 'bfloat16', 'int8'", "did you mean int"),
    Wrong({"protocol": {"quorum": 9}}, "quorum (K) is 9", "2 islands (M)", "lower protocol.quorum"),
    Wrong({"protocol": {"num_fragments": 0}}, "num_fragments is 0", "at least 1", "change it in the config"),
    Wrong({"protocol": {"num_fragments": 30}}, "num_fragments is 30", "sync_every = 6", "change it in the config"),
    Wrong({"protocol": {"sync_every": MIXED | {"mpl": 4}}}, "'mpl'", "no class of tensors", "use norm, embedding, mlp"),
    Wrong({"protocol": {"sync_every": MIXED | {"mlp": 0}}}, "sync_every.mlp is 0", "at least 1", "change it in"),
    Wrong({"protocol": {"sync_every": MIXED | {"mlp": 5}}}, "5 and 24", "the shorter divides", "use 20 or 25 for 24"),
    Wrong({"protocol": {"sync_every": MIXED | {"mlp": 2}}}, "overlap_steps is 2", "the shortest period, 2", "change"),
    Wrong({"protocol": {"sync_every": MIXED | {"*/x": 24}}}, "'*/x'", "no tensor is left for it", "the model has"),
    Wrong({"protocol": {"sync_every": {"mlp": 4}, "num_fragments": 4}}, "'blocks/", "no period for", "add rest"),
    Wrong({"protocol": {"sync_every": {"mlp": "x"}}}, "sync_every is {'mlp': 'x'}", "a valid integer", "it must be"),
    Wrong({"protocol": {"sync_later": {80: 12}}}, "global step 80", "the run has 80", "leave it out"),
    Wrong({"protocol": {"overlap_steps": 0}}, "overlap_steps is 0", "1 of 2 islands", "set the quorum to 2"),
    Wrong({"outer": {"learning_rate": float("nan")}}, "learning_rate is nan", "finite and above 0", "it must be"),
    Wrong({"optimizer": {"b1": 1.0}}, "optimizer.b1 is 1.0", "in [0, 1)", "it must be"),
    Wrong({"data": {"format": "tokens", "path": "x"}, "model": BUILT_IN}, "vocab_size is 256", "65536", "raise it"),
    Wrong({"data": {"mixture": {"a": {"path": "a", "weight": 0}}}}, "weight of 'a' is 0.0", "above 0", "it must be"),
    Wrong({"data": {"held_out_fraction": 1.5}}, "held_out_fraction is 1.5", "between 0 and 1", "it must be"),
    Wrong({"islands": {"mesh": {"expert": 2}}, "model": DROPLESS}, "mesh.expert is 2", "all experts", "make it 1"),
    Wrong({"islands": {"devices": 1, "mesh": {"rules": RULES}}, "model": BUILT_IN}, "'embd'", "no array", "choose fr"),
    Wrong({"islands": {"devices": 3}}, "batch of 4", "3 devices", "change train.batch_size"),
    Wrong({"islands": {"devices": 65}}, "devices is 65", "1 to 64", "or auto for what the machine has"),
    Wrong({"islands": {"topology": "v9:2x2"}}, "topology 'v9:2x2'", "no generation 'v9'", "write v"),
    Wrong({"islands": {"each": {"island-2": {}}}}, "'island-2'", "island-0 to island-1", "correct the name"),
    Wrong({"islands": {"restart_delay_s": float("nan")}}, "restart_delay_s nan", "0", "must be at least"),
    Wrong({"islands": {"standby": True, "hosts": 2, "devices": 2}}, "standby", "one process", "set it to false"),
    Wrong({"syncer": {"restart_delay_s": float("inf")}}, "restart_delay_s inf", "0", "must be at least"),
    Wrong({"watchdog": {"least_s": 60.0, "start_s": 5.0}}, "least_s is 60.0", "start_s 5.0", "use 0 (never)"),
    Wrong({"watchdog": {"median_factor": 0.5}}, "median_factor is 0.5", "at least 1", "it must be"),
    Wrong({"transport": {"address": "localhost:99999"}}, "'localhost:99999'", "up to 65535", "write host:port"),
    Wrong({"transport": {"connect_timeout_s": float("inf")}}, "connect_timeout_s is inf", "above 0", "use a number of"),
    Wrong({"transport": {"tls_ca": "certs/ca.pem"}}, "transport.tls_certificate is empty", "or none", "set tls_ca"),
    Wrong({"model": {"module": "nowhere:Thing"}}, "model.module 'nowhere:Thing'", "cannot be imported", "install or"),
    Wrong({"model": {"module": "Thing"}}, "model.module is 'Thing'", "package.module:Name", "write it as"),
    Wrong({"model": {"module": OWN + "Thing"}}, "model.module 'wrong_models:Thing'", "no attribute", "correct it"),
    Wrong({"model": {"module": "broken_model:Thing"}}, "broken_model.py, line 1", "SyntaxError", "correct it"),
    Wrong({"model": {"module": OWN + "NoArgs"}}, "wrong_models.py, line 9", "KeyError: 'width'", "or model.args"),
    Wrong({"model": {"module": OWN + "BadLoss"}}, "wrong_models.py, line 14", "TypeError", "correct it, or model.args"),
    Wrong({"model": {"module": OWN + "BadValue"}}, "wrong_models.py, line 19", "ValueError: not ours", "correct it"),
    Wrong({"model": BUILT_IN | {"args": {"dimm": 4}}}, "model.args.dimm", "is unknown", "did you mean model.args.dim?"),
    Wrong({"model": BUILT_IN | {"args": {"dim": "x"}}}, "model.args.dim is 'x'", "a str", "it must be a int"),
    Wrong({"model": BUILT_IN | {"preset": "qwen3-06b"}}, "preset is 'qwen3-06b'", "There are", "mean qwen3-0.6b?"),
)

WORDS = tuple(
    Wrong(*(part.strip() for part in line.split("|")))
    for line in Path(__file__).with_name("words.txt").read_text(encoding="utf-8").splitlines()
)
