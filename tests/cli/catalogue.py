"""The catalogue of wrong inputs: each row has the value, the limit and the remedy that its error must name.

`tests/cli/test_catalogue.py` makes the folder of the paths, and tries each row. A rule has one row; if a test beside a
setting's class checks the rule, it has no row here.
"""

import math
from typing import Any, NamedTuple

from diloco_jax.runtime.records.signals import WRONG_INPUT


class Wrong(NamedTuple):
    """Wrong input with the text that its line of error must contain."""

    # Changes of the small config, the text of a config, or the arguments of a command line.
    given: dict[str, Any] | str
    value: str
    limit: str
    remedy: str
    status: int = WRONG_INPUT


SLICED = "--islands.slices 2"
DECODER = "diloco_jax.training.models.decoder:Decoder"

# Aliases of aliases: a YAML reader that writes them out gets 66,430 pairs.
GROWING = [f"&{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in zip("abcde", "bcdef", strict=True)]
BOMB = f"seed: [&a [1, 1], {', '.join(GROWING)}]\n"

# `diloco train` refuses these configs, and `diloco doctor` finds what is wrong before the run.
FOUND_BY_DOCTOR = (
    Wrong("train:\n  stepz: 5\n", "train.stepz (value 5)", "unknown setting", "did you mean train.steps?"),
    Wrong("train: {steps: 5}\nseed: [1,\n", "config.yaml", "not valid YAML, line 3", "correct it there"),
    Wrong({"train": {"steps": "many"}}, "train.steps is 'many'", "a valid integer", "it must be"),
    Wrong({"data": {"path": "/no/data"}}, "data.path '/no/data'", "does not exist", "give a file, a folder"),
    Wrong({"data": {"path": ".", "patterns": ["*.no"]}}, "data.path '.'", "no file that matches", "correct data.patt"),
    Wrong({"data": {"path": "short.txt"}}, "short.txt' has 401 tokens", "windows of 32", "give more text"),
    Wrong(
        {"data": {"format": "text", "path": "some.txt", "tokenizer": "damaged"}},
        "damaged/tokenizer.json",
        "is damaged",
        "copy it again from",
    ),
    Wrong({"data": {"format": "store", "path": "empty"}}, "/empty'", "is not a token store", "see diloco tokenize"),
    Wrong({"data": {"format": "store", "path": "old"}}, "old/store.json has version 0", "reads 1", "make the store"),
    Wrong({"transport": {"address": "TAKEN"}}, "transport.address TAKEN", "in use", "choose another one"),
    Wrong({"syncer": {"metrics": "TAKEN"}}, "syncer.metrics TAKEN", "in use", "choose another one"),
    Wrong(
        {"transport": {"address": "no-such-host.invalid:7000", "allow_plaintext": True}},
        "transport.address no-such-host.invalid:7000",
        "cannot listen on",
        "use an address of",
    ),
    Wrong({"transport": {"address": "0.0.0.0:0"}}, "'0.0.0.0:0'", "is not loopback", "set transport.allow_plaintext"),
    Wrong({"transport": {"token_file": "none"}}, "transport.token_file none", "cannot be read", "correct the path"),
    Wrong({"transport": {"token_file": "nil"}}, "transport.token_file nil", "is empty", "write a secret into it"),
    Wrong(
        {"transport": {"tls_ca": "certs/ca.pem", "tls_certificate": "certs/{name}.pem", "tls_key": "none"}},
        "transport.tls_key none",
        "cannot be read",
        "`diloco certs`",
    ),
    Wrong(
        {"transport": {"tls_ca": "certs/ca.pem", "tls_certificate": "certs/late.pem", "tls_key": "certs/late.key"}},
        "certs/late.pem",
        "expired on 2020-01-02",
        "make a new one",
        1,
    ),
    Wrong(
        {
            "transport": {
                "tls_ca": "theirs/ca.pem",
                "tls_certificate": "certs/{name}.pem",
                "tls_key": "certs/{name}.key",
            }
        },
        "tls_ca is theirs/ca.pem",
        "not signed by",
        "use the file",
    ),
    Wrong({"trackers": ["wandbb"]}, "trackers has 'wandbb'", "wandb, trackio, mlflow", "did you mean wandb?"),
    Wrong(
        {"islands": {"topology": "v5p:2x2x1", "devices": "auto"}}, "v5p:2x2x1", "no TPU", "or run on a machine of that"
    ),
    Wrong({"callbacks": ["nowhere:Told"]}, "callbacks 'nowhere:Told'", "cannot be imported", "install or correct it"),
    Wrong(
        {"islands": {"command": ["nowhere"]}}, "islands.command 'nowhere'", "not a program here", "name one, such as"
    ),
    Wrong({"optimizer": {"warmup_steps": 100}}, "warmup_steps 100", "80 global steps", "lower warmup_steps"),
    Wrong(
        {"model": {"module": DECODER, "args": {}, "weights": "none"}},
        "none/config.json",
        "cannot be read",
        "name the whole folder of a public model",
    ),
)

# `diloco train` refuses these configs too.
CONFIGS = (
    Wrong(
        {"model": {"module": "own", "args": {}}, "transport": {"address": "file:///b"}},
        "file:///b",
        "a loop sends its model over a connection",
        "set transport.address to host:port",
    ),
    Wrong(
        {"syncer": {"standby": True}},
        "syncer.standby is true",
        "reads the run from a bucket",
        "or remove syncer.standby",
    ),
    Wrong(
        {"transport": {"address": "s3://b/p"}}, "'s3://b/p'", "nothing would be encrypted", "set transport.token_file"
    ),
    Wrong(
        {"evaluation": {"baseline": "none"}},
        "evaluation.baseline is 'none'",
        "cannot be read (No such file or directory)",
        "name the folder of a run",
    ),
    Wrong(
        {"evaluation": {"baseline": "damaged"}, "algorithm": "data_parallel"},
        "evaluation.baseline",
        "algorithm data_parallel has none",
        "remove it",
    ),
    Wrong("\udc89PNG", "config.yaml is not UTF-8", "invalid start byte", "name a YAML file, or a config"),
    Wrong("name: a\0b\n", "config.yaml", "#x0000", "correct it there"),
    Wrong("seed: " + "[" * 2000, "config.yaml is not valid YAML", "recursion depth", "correct it there"),
    Wrong("seed: " + "1" * 5000, "config.yaml is not valid YAML", "limit (4300 digits)", "correct it there"),
    Wrong(BOMB, "seed is [[1, 1], [[...], [...]", "a valid integer", "it must be"),
    Wrong("- 1\n- 2\n", "holds a list", "it must be a mapping", "such as 'train: {...}'"),
    Wrong("train:\n\tsteps: 5\n", "'\\t'", "not valid YAML, line 2", "correct it there"),
    Wrong("train: {steps: 5}\ntrain: {seq_len: 6}\n", "train is there twice", "not valid YAML, line 2", "correct it"),
    Wrong("seed: 2020-13-45\n", "config.yaml is not valid YAML", "month must be in 1..12", "correct it there"),
    Wrong("name: !!python/object/apply:os.system [ls]\n", "os.system", "not valid YAML, line 1", "correct it there"),
    Wrong("rate: 3\n", "rate (value 3)", "unknown setting", "known are name, runs_dir"),
    Wrong("trian: {steps: 5}\n", "trian (value {'steps': 5})", "unknown setting", "did you mean train?"),
    Wrong("train:\n", "train is None", "it is a section", "write its settings below it"),
    Wrong({"train": 7}, "train is 7", "it is a section", "write its settings below it"),
    Wrong({"train": {"steps": True}}, "train.steps is true", "a number", "it must be"),
    Wrong({"train": {"steps": 2.5}}, "train.steps is 2.5", "a valid integer", "it must be"),
    Wrong({"train": {"steps": 0}}, "train.steps is 0", "10^18", "it must be at least 1"),
    Wrong(
        {"train": {"steps": 1000000000000000000000000}},
        "train.steps is 1000000000000000000000000",
        "10^18",
        "it must be at least 1",
    ),
    Wrong({"train": {"tokens": -5}}, "train.tokens is -5", "1 to 10^18", "0 for a run of train.steps"),
    Wrong({"train": {"tokens": 255}}, "train.tokens is 255", "the 256 of one global step", "raise it"),
    Wrong({"train": {"tokens": 20736}}, "train.steps 80", "takes 81 global steps", "set train.steps to 0"),
    Wrong({"train": {"steps": 0, "tokens": 1025}, "optimizer": {"warmup_steps": 6}}, "warmup_steps 6", "5 gl", "lower"),
    Wrong(
        {"train": {"seq_len": 9999}, "model": {"module": DECODER, "args": {}}},
        "seq_len is 9999",
        "seq_len_max",
        "or lower train.seq_len",
    ),
    Wrong({"train": {"batch_size": 7}}, "batch_size is 7", "2 islands cannot share", "use a multiple of islands.count"),
    Wrong({"name": "a/b"}, "name is 'a/b'", "1 to 100 characters", "use a plain word"),
    Wrong({"name": "\u202etxt"}, "name is '\\u202etxt'", "1 to 100 characters", "use a plain word"),
    Wrong({"name": "x" * 101}, "name is 'xxx", "1 to 100 characters", "use a plain word"),
    Wrong("name: 2020-01-01\n", "name is datetime.date(2020, 1, 1)", "text", "in quotes"),
    Wrong({"trackers": "wandb"}, "trackers is 'wandb'", "it must be a list", "such as [a, b]"),
    Wrong({"seed": -1}, "seed is -1", "[0, 2^31)", "it must be in"),
    Wrong({"adopt": {"mode": "rebasee"}}, "adopt.mode is 'rebasee'", "'blend' or 'rebase'", "did you mean rebase?"),
    Wrong({"wire": {"up": "int3"}}, "wire.up is 'int3'", "'float32', 'bfloat16', 'int8'", "did you mean int"),
    Wrong({"islands": {"least": 3}}, "islands.least is 3", "islands.count = 2", "or 0 for all"),
    Wrong({"islands": {"least": 1}, "protocol": {"quorum": 2}}, "least is 1", "quorum is 2", "lower the quorum"),
    Wrong({"cloud": {"extra": {"queue": "a"}}}, "cloud.extra is set", "all 2 islands", "set islands.least to fewer"),
    Wrong({"protocol": {"quorum": 9}}, "quorum (K) is 9", "2 islands (M)", "lower protocol.quorum"),
    Wrong(
        {"protocol": {"sync_every": {"mlp": 4, "rest": 24, "mpl": 4}}},
        "'mpl'",
        "not a class of tensors",
        "use norm, embedding, mlp",
    ),
    Wrong({"protocol": {"sync_every": {"mlp": 0, "rest": 24}}}, "sync_every.mlp is 0", "at least 1", "change it in"),
    Wrong(
        {"protocol": {"sync_every": {"mlp": 5, "rest": 24}}}, "5 and 24", "the shorter divides", "use 20 or 25 for 24"
    ),
    Wrong(
        {"protocol": {"sync_every": {"mlp": 2, "rest": 24}}}, "overlap_steps is 2", "the shortest period, 2", "change"
    ),
    Wrong(
        {"protocol": {"sync_every": {"mlp": 4, "rest": 24, "*/x": 24}}},
        "'*/x'",
        "no tensor is left for it",
        "the model has",
    ),
    Wrong({"protocol": {"sync_every": {"mlp": 4}, "num_fragments": 4}}, "'blocks/", "no period for", "add rest"),
    Wrong({"protocol": {"sync_every": {"mlp": "x"}}}, "sync_every is {'mlp': 'x'}", "a valid integer", "it must be"),
    Wrong({"protocol": {"sync_later": {80: 12}}}, "global step 80", "the run has 80", "leave it out"),
    Wrong({"protocol": {"overlap_steps": 0}}, "overlap_steps is 0", "1 of 2 islands", "set the quorum to 2"),
    Wrong({"outer": {"learning_rate": math.nan}}, "learning_rate is nan", "finite and above 0", "it must be"),
    Wrong(
        {"data": {"format": "tokens", "path": "x"}, "model": {"module": DECODER, "args": {}}},
        "vocab_size is 256",
        "65536",
        "raise it",
    ),
    Wrong({"data": {"mixture": {"a": {"path": "a", "weight": 0}}}}, "weight of 'a' is 0.0", "above 0", "it must be"),
    Wrong({"data": {"held_out_fraction": 1.5}}, "held_out_fraction is 1.5", "between 0 and 1", "it must be"),
    Wrong(
        {
            "islands": {"mesh": {"expert": 2}},
            "model": {"module": "diloco_jax.training.models.moe:MoeDecoder", "args": {"routing": "dropless"}},
        },
        "mesh.expert is 2",
        "all experts",
        "make it 1",
    ),
    Wrong(
        {"islands": {"devices": 1, "mesh": {"rules": {"embd": ["fsdp"]}}}, "model": {"module": DECODER, "args": {}}},
        "'embd'",
        "no array",
        "choose fr",
    ),
    Wrong({"islands": {"devices": 3}}, "batch of 4", "3 devices", "change train.batch_size"),
    Wrong({"islands": {"topology": "v9:2x2"}}, "topology 'v9:2x2'", "no generation 'v9'", "write v"),
    Wrong({"islands": {"each": {"island-2": {}}}}, "'island-2'", "island-0 to island-1", "correct the name"),
    Wrong({"islands": {"restart_delay_s": math.nan}}, "restart_delay_s nan", "0", "must be at least"),
    Wrong({"islands": {"standby": True, "hosts": 2, "devices": 2}}, "standby", "one process", "set it to false"),
    Wrong({"islands": {"slices": 65}}, "islands.slices is 65", "1 to 64", "use"),
    Wrong({"islands": {"slices": 2, "slices_least": 3}}, "slices_least is 3", "islands.slices = 2", "raise slices"),
    Wrong({"islands": {"slices": 2, "straggler_s": 0}}, "straggler_s is 0", "more than 0", "use seconds"),
    Wrong({"islands": {"slices": 2, "standby": True}}, "slices is 2", "islands.standby does not fit", "leave one"),
    Wrong({"islands": {"slices": 3}}, "batch of 4", "islands.slices 3", "change train.batch_size"),
    Wrong({"islands": {"slices": 2, "devices": 4}}, "part of 2", "4 devices", "change train.batch_size"),
    Wrong({"islands": {"slices": 2}, "algorithm": "data_parallel"}, "slices is 2", "decoupled", "set it to 1"),
    Wrong({"syncer": {"restart_delay_s": math.inf}}, "restart_delay_s inf", "0", "must be at least"),
    Wrong({"watchdog": {"least_s": 60.0, "start_s": 5.0}}, "least_s is 60.0", "start_s 5.0", "use 0 (never)"),
    Wrong({"watchdog": {"median_factor": 0.5}}, "median_factor is 0.5", "at least 1", "it must be"),
    Wrong({"transport": {"tls_ca": "certs/ca.pem"}}, "transport.tls_certificate is empty", "or none", "set tls_ca"),
    Wrong({"model": {"module": "nowhere:Thing"}}, "model.module 'nowhere:Thing'", "cannot be imported", "install or"),
    Wrong({"model": {"module": "Thing"}}, "model.module is 'Thing'", "package.module:Name", "write it as"),
    Wrong(
        {"model": {"module": "wrong_models:Thing"}}, "model.module 'wrong_models:Thing'", "no attribute", "correct it"
    ),
    Wrong({"model": {"module": "broken_model:Thing"}}, "broken_model.py, line 1", "SyntaxError", "correct it"),
    Wrong(
        {"model": {"module": "wrong_models:NoArgs"}}, "wrong_models.py, line 9", "KeyError: 'width'", "or model.args"
    ),
    Wrong(
        {"model": {"module": "wrong_models:BadLoss"}},
        "wrong_models.py, line 14",
        "TypeError",
        "correct it, or model.args",
    ),
    Wrong(
        {"model": {"module": "wrong_models:BadValue"}}, "wrong_models.py, line 19", "ValueError: not ours", "correct it"
    ),
    Wrong(
        {"model": {"module": DECODER, "args": {"dimm": 4}}},
        "model.args.dimm",
        "is unknown",
        "did you mean model.args.dim?",
    ),
    Wrong({"model": {"module": DECODER, "args": {"dim": "x"}}}, "model.args.dim is 'x'", "a str", "it must be a int"),
    Wrong(
        {"model": {"module": DECODER, "args": {}, "preset": "qwen3-06b"}},
        "preset is 'qwen3-06b'",
        "There are",
        "mean qwen3-0.6b?",
    ),
)

COMMAND_LINES = (
    Wrong("", "diloco", "name a command", "such as train"),
    Wrong("trian config.yaml", "'trian'", "there is no command", "did you mean train?"),
    Wrong("train", "config", "the following arguments are required", "`diloco train --help`"),
    Wrong("train config.yaml --run-dirr x", "--run-dirr", "there is no option", "did you mean --run-dir?"),
    Wrong("status damaged --jsn", "--jsn", "there is no option", "did you mean --json?"),
    Wrong("status damaged twice", "twice", "unrecognized arguments", "`diloco status --help`"),
    Wrong("plan config.yaml --chips x", "'x'", "--chips: invalid int value", "`diloco plan --help`"),
    Wrong("plan", "no config", "is named", "give a YAML file, or quickstart"),
    Wrong("plan config.yaml --mfu 2", "--mfu is 2.0", "at most 1", "use a share above 0"),
    Wrong("stage config.yaml --sites 1", "--sites is 1", "use at least 2", "one site needs no stages"),
    Wrong("stage config.yaml --baseline runs/x", "--baseline runs/x", "is compared with a run", "add --run RUN"),
    Wrong("train config.yaml --train.stepz 5", "train.stepz (value 5)", "unknown setting", "did you mean train.steps?"),
    Wrong("train config.yaml --train.steps", "--train.steps", "needs a value", "config.yaml --settings` lists all"),
    Wrong(
        "train config.yaml --data.patterns *.a --data.patterns *.b",
        "--data.patterns",
        "given twice",
        "--data.patterns A B",
    ),
    Wrong("train config.yaml --train.steps 4 5", "(4 5)", "takes one value, not 2", "--settings` lists all settings"),
    Wrong("train config.yaml --train.steps x", "train.steps is 'x'", "a valid integer", "it must be"),
    Wrong("train config.yaml --train.steps.x 5", "train.steps is {'x': 5}", "a valid integer", "it must be"),
    Wrong("train config.yaml --wire.up=int3", "wire.up is 'int3'", "'float32', 'bfloat16'", "did you mean int"),
    Wrong("train config.yaml --outer.learning_rate -1", "learning_rate is -1", "finite and above 0", "it must be"),
    Wrong("train config.yaml --model.args {", "--model.args is '{'", "is not valid YAML", "--settings` lists all"),
    Wrong(
        "train config.yaml --islands.each.island-0.device 1",
        "islands.each.island-0.device (value",
        "unknown setting",
        "did you mean islands.each.island-0.devices?",
    ),
    Wrong("train config.yaml train.steps=5", "'train.steps' is not a setting", "follow the config", "--section.name"),
    Wrong("train --train.steps 5 config.yaml", "train config.yaml --section.name", "comes first", "settings follow it"),
    Wrong("train none.yaml", "config none.yaml", "cannot be read: No such file", "name a YAML file"),
    Wrong("train quikstart", "config quikstart", "cannot be read: No such file", "did you mean quickstart?"),
    Wrong("train empty", "config empty", "cannot be read: Is a directory", "name a YAML file, or a config"),
    Wrong("train /dev/zero", "config /dev/zero has more than", "1048576 bytes, the limit", "name a YAML file, or a"),
    Wrong("init quikstart", "'quikstart'", "choose from 'chaos'", "did you mean quickstart?"),
    Wrong("init quickstart --dir file", "file", "File exists", "choose another path"),
    Wrong("train config.yaml --run-dir file", "--run-dir file", "is a file", "name a folder"),
    Wrong("train config.yaml --run-dir file/run", "file/run", "Not a directory", "choose another path"),
    Wrong("train config.yaml --run-dir /proc/no/run", "/proc/no", "No such file", "choose another path"),
    Wrong("train config.yaml --run-dir damaged", "damaged holds a run already", "--run-dir", "continue it"),
    Wrong("train config.yaml --resume --run-dir empty", "empty", "holds no run", "leave out --resume, or name another"),
    Wrong("train config.yaml --resume --run-dir parallel", "parallel", "data-parallel run", "leave out --resume"),
    Wrong(
        "train config.yaml --resume --run-dir ended",
        "ended",
        "complete, after 80 global steps",
        "--resume --train.steps 160)",
    ),
    Wrong(
        "train config.yaml --resume --run-dir orphans",
        "orphans/tape.jsonl is empty",
        "holds 1 snapshots",
        "diloco export orphans --out",
    ),
    Wrong(
        "train config.yaml --run-dir orphans",
        "orphans/tape.jsonl is empty",
        "holds 1 snapshots",
        "diloco export orphans --out",
    ),
    Wrong(
        "syncer config.yaml --run-dir orphans",
        "orphans/tape.jsonl is empty",
        "holds 1 snapshots",
        "diloco export orphans --out",
    ),
    Wrong(
        "syncer config.yaml --rewind --run-dir orphans",
        "orphans/tape.jsonl is empty",
        "holds 1 snapshots",
        "diloco export",
    ),
    Wrong(
        "syncer config.yaml --rewind --run-dir empty",
        "empty/tape.jsonl is missing",
        "nothing to go back to",
        "leave out --rewind",
    ),
    Wrong(
        "train config.yaml --run-dir parallel",
        "parallel holds a run already",
        "cannot continue",
        "choose another --run-dir",
    ),
    Wrong(
        "train config.yaml --resume --run-dir blank",
        "blank/config.yaml is empty",
        "settings of this run are lost",
        "cp CONFIG.yaml",
    ),
    Wrong(
        "train blank/config.yaml --resume --run-dir blank", "blank/config.yaml is empty", "settings", "cp CONFIG.yaml"
    ),
    Wrong(
        "audit blank", "blank/config.yaml is empty", "settings of this run are lost", "cp CONFIG.yaml blank/config.yaml"
    ),
    Wrong("train config.yaml --resume --runs_dir none", "none holds no run named small", "could continue", "--run-dir"),
    Wrong(
        "train config.yaml --resume --run-dir damaged --train.batch_size 16",
        "train.batch_size is 16",
        "started with 8",
        "diloco train damaged/config.yaml --run-dir damaged --resume)",
    ),
    Wrong("certs file --learners a", "file", "File exists", "choose another path"),
    Wrong("certs new --learners a/b", "'a/b'", "at most 100 letters, digits", "use"),
    Wrong("certs new --days 0", "--days is 0", "1 to 3650", "use"),
    Wrong("status none", "none has no status.json", "No such file", "give a run's folder or host:port"),
    Wrong("status damaged", "damaged/status.json", "is not readable", "try again, or remove it"),
    Wrong("status cut", "cut has no status yet", "it is starting, or ended", "see the output of its syncer"),
    Wrong("status localhost:99999", "'localhost:99999'", "a port up to 65535", "write host:port"),
    Wrong("status 10.0.0.1:5000", "'10.0.0.1:5000'", "is not loopback", "set transport.tls_ca"),
    Wrong("drain island-0 none", "none", "is not the folder of a run: it has no config.yaml", "give one, such as"),
    Wrong("drain island-0 damaged", "damaged/syncer.address is 'nonsense'", "a port up to 65535", "write host:port"),
    Wrong("ban island-0 none", "a ban needs a reason", "needs", "give one with --why TEXT"),
    Wrong(f"ban island-0 none --why {'x' * 201}", "has 201 characters", "the limit is 200", "shorten it"),
    Wrong("ban island-0 none --why 'a\tb'", r"'a\tb' has unprintable", "such as a line break", "give one line of text"),
    Wrong(
        "ban island-0 none --why x", "none", "is not the folder of a run: it has no config.yaml", "give one, such as"
    ),
    Wrong("admit island-0 damaged", "damaged/syncer.address is 'nonsense'", "a port up to 65535", "write host:port"),
    Wrong("profile damaged --island island-0", "'island-0'", "there are: none yet", "name one, and the run's folder"),
    Wrong("profile damaged --island island-0 --steps 0", "--steps is 0", "1 to 1000", "use"),
    Wrong("audit none", "none", "is not the folder of a run: it has no config.yaml", "give one, such as runs/NAME"),
    Wrong("audit damaged", "damaged/tape.jsonl", "has no step of any learner", "give the folder of another run"),
    Wrong("audit cut", "cut/tape.jsonl: tape line 1", "fewer than 5 fields", '["Hello"]'),
    Wrong(
        "audit changed",
        "changed/tape.jsonl: between its lines 0 and 1",
        "missing, doubled or changed",
        "restore the tape from a copy",
    ),
    Wrong("audit gap", "gap/tape.jsonl: bytes 0 to 4 of it", "are missing", "restore the file in"),
    Wrong("replay none", "none", "is not the folder of a run: it has no config.yaml", "give one, such as runs/NAME"),
    Wrong("report none", "none/metrics.jsonl", "does not exist", "give the folder of a run"),
    Wrong("report damaged", "damaged/metrics.jsonl", "no step of any learner yet", "wait until the run has begun"),
    Wrong("report damaged --perfetto", "damaged/tape.jsonl", "has no step of any learner", "of another run"),
    Wrong("view none", "none is not the folder", "of a run: it has no config.yaml", "give one, such as runs/NAME"),
    Wrong("view damaged --listen 0.0.0.0:0", "0.0.0.0:0", "is not loopback", "or --allow-plaintext"),
    Wrong("view damaged --listen nonsense", "--listen is 'nonsense'", "a port up to 65535", "write host:port"),
    Wrong("view damaged --token-file none/token", "none/token", "No such file", "choose another path"),
    Wrong("compare damaged none", "none is not the folder", "of a run: it has no config.yaml", "give one, such as"),
    Wrong("eval none", "none holds no checkpoint", "that can be read", "give the folder of a run"),
    Wrong("eval damaged --batches 0", "--batches is 0", "at least 1", "use"),
    Wrong("eval none --tasks x --tasks-folder none", "--tasks-folder none", "not a folder", "give one with lm-eval's"),
    Wrong("sample none", "none holds no checkpoint", "that can be read", "give the folder of a run"),
    Wrong("sample none --tokens 0", "--tokens is 0", "at least one token", "use"),
    Wrong("sample none --temperature 1e-40", "--temperature 1e-40", "from 1e-06 to 1e+06", "a temperature of 0 or"),
    Wrong("sample none --top-k -1", "--top-k is -1", "a number of tokens of at least 0", "use"),
    Wrong("sample none --min-p 2", "--min-p 2", "a share from 0 to 1", "use"),
    Wrong("sample none --prompt a --prompt b --image c", "2 --prompt with --image", "give one prompt", "leave the"),
    Wrong("sample none --system x", "--system is 'x'", "which only a conversation has", "add --chat, or remove it"),
    Wrong("sample none --chat --image c", "--image is not read", "in conversations", "leave --chat or --image out"),
    Wrong("sample none --seed -1", "--seed is -1", "[0, 2^31)", "it must be in"),
    Wrong("export none --out new", "none is not the folder", "of a run: it has no config.yaml", "give one, such as"),
    Wrong("export damaged --out file", "file exists", "is not an empty folder", "choose another --out"),
    Wrong("export damaged --out new --format npy", "'npy'", "choose from 'hf', 'orbax', 'npz'", "did you mean npz?"),
    Wrong("import empty", "empty/config.json", "cannot be read: No such file", "name the whole folder of a public"),
    Wrong("import public", "lacks 'num_attention_heads'", "config.json of llama", "copy it again"),
    Wrong("tokenize none --tokenizer bytes --out new", "'none'", "no text file with content", "correct the path, or"),
    Wrong("tokenize file --tokenizer bites --out new", "'bites'", "no tokenizer.json", "train:SIZE, or bytes"),
    Wrong(
        "tokenize file --tokenizer bytes --out new --loss-on last", "--loss-on is last", "only", "add --chat, or remove"
    ),
    Wrong("tokenize file --tokenizer train:300 --out new --chat", "'file' has no JSONL", "conversations are rows", ""),
    Wrong("tokenize file --tokenizer train:3 --out new", "train:3", "from 257 to 1048576", "the size must be a number"),
    Wrong("tokenize file --tokenizer damaged --out new", "damaged/tokenizer.json", "is damaged", "copy it again from"),
    Wrong("tokenize file --tokenizer bytes --out file", "file", "Not a directory", "choose another path"),
    Wrong("tokenize file --tokenizer bytes --out new --workers 0", "--workers is 0", "1 or more", "use"),
    Wrong("doctor config.yaml --seconds nan", "--seconds is nan", "at most 10", "use more than 0"),
    Wrong("doctor config.yaml --island a/b", "'a/b'", "at most 100 letters, digits", "use"),
    Wrong("doctor config.yaml --listen", "transport.address is 127.0.0.1:0", "--listen needs a port", "add --tran"),
    Wrong("chaos config.yaml --kinds kil --dry-run", "kinds of faults: kil", "kill, stop, kill-syncer", "choose from"),
    Wrong("chaos config.yaml --faults 0 --dry-run", "0 faults", "1 to 10000", "use"),
    Wrong("chaos config.yaml --kinds kill --data.path /no/data", "'/no/data'", "does not exist", "give a file"),
    Wrong("simulate --methods decupled", "decupled", "does not exist", "choose from rigid, elastic"),
    Wrong("simulate --chips 12q", "--chips is '12q'", "must be a number", "write 150000, 150k"),
    Wrong("simulate --hours nan", "--hours is nan", "at most 8784", "simulate more than 0"),
    Wrong("simulate --protocol.quorm 3", "--protocol.quorm", "does not exist", "do you mean --protocol.quorum?"),
    Wrong("preflight config.yaml", "island-0 names no TPU slice", "islands.topology", "add --topology v5p:2x2x1"),
    Wrong("preflight config.yaml --topology v5p:2x2", "'v5p:2x2'", "3 sizes of at least 1", "such as v5p:2x2x1"),
    Wrong("preflight config.yaml --search ''", "--search", "is empty", "name a path, or leave it out"),
    Wrong("launch gek config.yaml", "'gek'", "choose from 'gke', 'pathways', 'gce', 'tpu-vm'", "did you mean gke?"),
    Wrong("launch gke config.yaml", "cloud.project", "launch gke needs", "or add --cloud.project VALUE"),
    Wrong(
        f"launch sky config.yaml {SLICED}", "islands.slices is 2", "with launch sky a machine", "use launch gke, tpu-vm"
    ),
    Wrong(
        "launch gke config.yaml --transport.address file:///b", "file:///b", "a bucket, and `diloco", "leave transport"
    ),
    Wrong("doctor config.yaml --listen --transport.address file:///b", "file:///b", "a bucket", "leave out --listen"),
    Wrong(
        "chaos config.yaml --kinds cut --transport.address file:///b", "file:///b", "faults of a relay", "choose kills"
    ),
    Wrong("clean 127.0.0.1:7", "127.0.0.1:7", "not a bucket", "leaves nothing to delete"),
    Wrong("clean s4://b/p", "'s4://b/p'", "a bucket is", "s3://BUCKET/PREFIX"),
    Wrong(
        f"learner config.yaml --island island-0 {SLICED}",
        "--slice is None",
        "slices 0 to 1 (islands.slices)",
        "give each process its number",
    ),
    Wrong("learner config.yaml --island island-0 --slice 0", "--slice is 0", "islands.slices is 1", "leave it out, or"),
    Wrong(f"learner config.yaml --island island-0 {SLICED} --slice 2", "--slice is 2", "slices 0 to 1", "give each"),
    Wrong(
        f"learner config.yaml --island island-0 {SLICED} --slice 0 --slices 127.0.0.1:7001",
        "--slices names 1 addresses",
        "islands.slices is 2",
        "write HOST:PORT of each slice",
    ),
    Wrong("learner config.yaml", "--island", "the following arguments are required", "`diloco learner --help`"),
)
