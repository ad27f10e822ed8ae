"""Every error that a command line of these can raise: its cure is taken out of what was printed, and pasted.

A row has a command that fails, the part of its cure that a user takes, and what a user types next. That must end well,
or with another error where the row says so. `test_every_cure_that_can_be_pasted_is` compares the rows with the page of
all errors, docs/reference/errors.md, so that a new cure with a command, an option or a variable needs a row.
"""

from __future__ import annotations

import os
import pickle
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
import tomllib
from contextlib import closing
from dataclasses import dataclass, field

import pytest

import wherry
from tests.support.command import small, typed
from tests.support.readme import PAGES, ROOT
from tests.support.tiny_models import save_tiny


@dataclass(frozen=True)
class Raised:
    """A command that fails, and what its cure leads to.

    Attributes:
        line: the command; HOME stands for a folder with checkpoints.
        what: the error, as docs/reference/errors.md has it.
        taken: pattern of what a user takes from the cure, with groups.
        then: what is typed next; <1> stands for the first group. By default, that is a command of wherry.
        ends: the exit code of that.
        where: environment variables of the failing command.
    """

    line: str
    what: str
    taken: str
    then: str = "<1>"
    ends: int = 0
    where: dict[str, str] = field(default_factory=dict)


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:" + 64 * "0" + "\nsize 12345\n"
COMMAND = r"`wherry ([^`]+)`"
ONE, MODEL, MAXTEXT = "HOME/one.safetensors", "HOME/model", "HOME/maxtext"
ORBAX = f"convert {ONE} HOME/new --to orbax"
DCP = f"convert {ONE} HOME/new --to dcp"
TO_MAXTEXT = f"convert {MODEL} HOME/new --to maxtext"
CHUNKS = "write for example `(--set chunks=8x1)`, or `(--set '[^`]+)`"
RENAME = "for example `(--rename '[^`]+)`"
SCAN = "write `(--set 'scan=[^`]+)` to stack"
MERGE = r"write `wherry merge 'A(\*0\.5)' 'B(\*0\.5)' DST (--to) FORMAT`"
MERGED = f"merge '{MODEL}<1>' '{MODEL}<2>' HOME/new <3> huggingface"
ENGINES = "choose one of: (threads), (processes):N"
RANKS = "HOME/new --to vllm-sharded"
ROWS = [
    # options of a conversion
    Raised(f"convert {MODEL} {RANKS} --set tp=3", "… … cannot be divided among … …, as vLLM requires",
           "for example (--set tp=1)", f"convert {MODEL} {RANKS} <1>"),
    Raised(f"convert {MODEL} {RANKS} --set tp=none", "invalid value for option tp: …",
           "number of ranks: (--set tp=4)", f"convert {MODEL} {RANKS} <1>"),
    Raised(f"convert HOME/neox {RANKS}", "no rule divides a model … among vLLM's ranks",
           "such as (--to huggingface)", "convert HOME/neox HOME/new <1>"),
    Raised(f"convert HOME/coded {RANKS}", "the weights are quantised; vllm-sharded is written for plain weights",
           "add (--set dequantize=bfloat16)", f"convert HOME/coded {RANKS} <1>"),
    Raised(f"convert HOME/mixed {RANKS}", "… is one tensor of vLLM, but its parts have the element types …",
           "choose one with (--dtype bfloat16)", f"convert HOME/mixed {RANKS} <1>"),
    Raised(f"{TO_MAXTEXT} --config HOME/junk.json",
           "--config … is not the config of a model…: it states none of its sizes",
           "pass the model's (config.json), .* with (--config)", f"{TO_MAXTEXT} <2> {MODEL}/<1>"),
    Raised(f"{TO_MAXTEXT} --config HOME/junk.json --dtype bfloat61", "invalid value for --dtype: …",
           "did you mean (bfloat16)", f"{TO_MAXTEXT} --dtype <1>"),
    Raised(f"convert {ONE} HOME/new HOME/new2 --to dcp --to orbax --on processes:2",
           "an engine writes only one target at a time", "leave out --on",
           f"convert {ONE} HOME/new HOME/new2 --to dcp --to orbax"),
    Raised(f"convert {ONE} HOME/new HOME/second --to dcp", "expected one --to for each TARGET, got … for …",
           "give (--to) FORMAT once for each", f"convert {ONE} HOME/new HOME/second --to dcp <1> orbax"),
    Raised(f"convert {ONE} HOME/new", "missing option '--to'", COMMAND),
    Raised(f"{ORBAX} --set zarr", "invalid value …; expected NAME=VALUE", "put (=) between",
           f"{ORBAX} --set zarr<1>3"),
    Raised(f"{ORBAX} --set nope=9", "unknown option … for format …", COMMAND),
    Raised(f"{ORBAX} --set zarr=9", "invalid value for option …: …", "choose (2) or 3", f"{ORBAX} --set zarr=<1>"),
    Raised(f"{ORBAX} --set axes=HOME/axes.toml", "axes: pattern … matches no remaining tensor", COMMAND),
    Raised(f"{ORBAX} --set boxed=x/*", "boxed: pattern … matches no array", COMMAND),
    Raised(f"{ORBAX} --set chunks=mesh:data=4", "missing spec: or rules: in chunks", CHUNKS, f"{ORBAX} <2>"),
    Raised(f"{ORBAX} --set 'chunks=mesh:data=four;spec:*=data'", "invalid number of devices … in chunks=…", CHUNKS,
           f"{ORBAX} <1>"),
    Raised(f"{ORBAX} --set 'chunks=mesh:data=4;spec:*=zata'", "unknown mesh axis in chunks: …", CHUNKS,
           f"{ORBAX} <1>"),
    Raised(f"{ORBAX} --set 'chunks=mesh:data;spec:*=data'", "invalid value for chunks: …; expected pairs NAME=VALUE",
           CHUNKS, f"{ORBAX} <1>"),
    Raised(f"{ORBAX} --set 'chunks=mesh:data=4;spec:*=data,data'",
           "duplicate mesh axis in a partition spec: …", CHUNKS, f"{ORBAX} <2>"),
    Raised(f"{ORBAX} --set 'chunks=mesh:data=4;foo:*=data'",
           "invalid clause … in chunks; expected mesh:, spec: or rules:", CHUNKS, f"{ORBAX} <2>"),
    Raised(f"{ORBAX} --set 'chunks=mesh:data=7;spec:*=data'", "extent … is not divisible by … devices",
           "add a (spec:) for this tensor before", f"{ORBAX} --set 'chunks=mesh:data=7;<1>*=;spec:*=data'"),
    Raised(f"{ORBAX} --set 'chunks=mesh:data=2;spec:*=data,data,data'",
           "partition spec has … entries, the tensor … axes",
           "add a (spec:) for this tensor before", f"{ORBAX} --set 'chunks=mesh:data=2;<1>*=;spec:*=data,data,data'"),
    Raised(f"{ORBAX} --set chunks=abc", "invalid value for chunks: …", r"pass (auto), store",
           f"{ORBAX} --set chunks=<1>"),
    Raised(f"{DCP} --rename a", "invalid rename rule …", RENAME, f"{DCP} <1>", 2),
    Raised(f"{DCP} --rename '{{a -> b'", "unmatched brace in rename rule …", RENAME, f"{DCP} <1>", 2),
    Raised(f"{DCP} --rename '{{a}}{{b}} -> {{b}}{{a}}'",
           "adjacent names in rename rule …: a literal must separate them", RENAME, f"{DCP} <1>", 2),
    Raised(f"{DCP} --rename '{{a b}} -> x'", "invalid name {…} in rename rule …", RENAME, f"{DCP} <1>", 2),
    Raised(f"{DCP} --rename '{{a}} -> x'",
           "rename rule … has no inverse: both sides must have the same names, each once",
           RENAME, f"{DCP} <1>", 2),
    Raised(f"{DCP} --rename 'zzz -> b'", "rename rule … matches no remaining key path", COMMAND),
    Raised(f"{DCP} --set 'scan=a_{{layers}} -> layers:0'", "no key path matches … or …", COMMAND),
    Raised(f"{DCP} --set scan=zzz", "invalid value for scan: …", SCAN, f"{DCP} <1>", 2),
    Raised(f"{DCP} --set join=. --set split=/", "split and join are mutually exclusive", "remove one of the two",
           f"{DCP} --set join=."),
    Raised(f"{DCP} --verify store", "no store computes checksums of a … target as it is written",
           "choose (--verify digest)", f"{DCP} <1>"),
    Raised(f"{DCP} --assets HOME/empty", "… changes nothing in this conversion: …", "remove the option", DCP),
    Raised(f"{TO_MAXTEXT} --assets HOME/empty",
           "no tokenizer, chat template, generation config or licence found among the assets",
           "pass a folder that contains them with (--assets)", f"{TO_MAXTEXT} <1> {MODEL}"),
    Raised(f"{DCP} --memory 2", "a memory budget of … is too small; the smallest is 1MiB",
           "for example (--memory 2GiB)", f"{DCP} <1>"),
    Raised(f"{DCP} --memory lots", "invalid size …", "write for example (128MiB)", f"{DCP} --memory <1>"),
    Raised(f"{ORBAX} --into", "the source has no step number", "pass (--as-step) N", f"{ORBAX} --into <1> 7"),
    Raised(f"{DCP} --on sparks", "unknown engine …", ENGINES, f"{DCP} --on <1>"),
    Raised(f"{DCP} --on sparks:2", "unknown engine …", ENGINES, f"{DCP} --on <2>:1"),
    Raised(f"{DCP} --on processes:x", "invalid number of workers: …", "for example (processes:)4",
           f"{DCP} --on <1>1"),
    Raised(f"{DCP} --set dequantize=int8",
           "nothing can be dequantised: no config next to the source states it, and it has no quantised blocks",
           "leave dequantize out", DCP),
    Raised(f"convert {MODEL} HOME/new --to huggingface --set quantize=int3", "cannot quantise to …",
           "choose one of (fp8)", f"convert {MODEL} HOME/new --to huggingface --set quantize=<1>"),
    Raised(f"convert {MODEL} HOME/new --to huggingface --set quantize=mxfp4",
           "no tensor can be quantised with …: it is for ……",
           "choose one of (fp8)", f"convert {MODEL} HOME/new --to huggingface --set quantize=<1>"),
    Raised(f"convert {MODEL} HOME/new --to huggingface --set quantize=int8 --set group_size=16",
           "cannot quantise to … in groups of …",
           "choose one of (32)", f"convert {MODEL} HOME/new --to huggingface --set quantize=int8 --set group_size=<1>"),
    Raised(f"convert {MODEL} HOME/new --to huggingface --set quantize=fp8 --set group_size=64", "… is fixed for …",
           "leave group_size out", f"convert {MODEL} HOME/new --to huggingface --set quantize=fp8"),
    Raised(f"convert {MAXTEXT} HOME/new.safetensors --to safetensors", "… cannot hold …",
           "with `(--set join=.)`", f"convert {MAXTEXT} HOME/new.safetensors --to safetensors <1>", 7),
    Raised(f"convert {MAXTEXT} HOME/new --to huggingface --set rope=interleaved", "… = … is stated, but … … = …",
           "leave (--set rope=interleaved) out", f"convert {MAXTEXT} HOME/new --to huggingface"),
    Raised(f"convert {MODEL} HOME/new --to orbax --item nope", "item … not found", COMMAND),
    Raised(f"convert {ONE} HOME/new --to maxtext", "… has no layout for …", "with (--to orbax)",
           f"convert {ONE} HOME/new <1>"),
    Raised(f"convert {ONE} HOME/new --to huggingface", "… has no layout for …", "with (--family none)",
           f"convert {ONE} HOME/new --to huggingface --set join=. <1>"),
    Raised(f"{TO_MAXTEXT} --family lama", "unknown family …", "did you mean (llama)", f"{TO_MAXTEXT} --family <1>"),
    Raised(f"{DCP} --as-step 99999999999999999999999", "invalid step number", "write a number from (0)",
           f"{DCP} --as-step <1>"),
    Raised(f"convert {ONE} HOME/new --to equinox", "writing … is not supported", "choose one of: (dcp)",
           f"convert {ONE} HOME/new --to <1>"),
    Raised(f"convert {ONE} models:/pasted --to dcp", "… is a model URI; expected a path or a storage URI", COMMAND),
    Raised(f"convert {ONE} HOME/new --overwrite --to dcp", "", r"`(--if-exists skip)`", f"{DCP} <1>"),
    Raised(f"plan {ONE} HOME/new --to dcp --workers 2 --rate fast", "invalid rate …", "for example (400MB/s)",
           f"plan {ONE} HOME/new --to dcp --workers 2 --rate <1>"),
    # merges, rewrites
    Raised(f"merge {ONE} HOME/new --to dcp", "expected at least two sources and a target", MERGE, MERGED),
    Raised(f"merge {ONE}*x {ONE} HOME/new --to dcp", "invalid weight … of …", MERGE, MERGED),
    Raised(f"merge {ONE}*nan {ONE}*0.5 HOME/new --to dcp", "invalid weight …", "state a finite number",
           f"merge {MODEL}*1 {MODEL}*1 HOME/new --to huggingface"),
    Raised(f"rewrite {MAXTEXT} HOME/new --as box", "Orbax item not found", "pass the item: (.*) (--format orbax)",
           "rewrite <1> HOME/new --as box <2>"),
    Raised(f"rewrite {MAXTEXT}/items HOME/new --as box=x/* --format orbax", "array not found", COMMAND),
    Raised("rewrite HOME/dcp HOME/new --as nothing", "unknown rewrite … for format …", "choose (for-torch)",
           "rewrite HOME/dcp HOME/new --as <1>"),
    # looking and verifying
    Raised("audit HOME/dcp --registered", "--registered cannot be combined with ROOT", "leave out one of them",
           "audit HOME/dcp"),
    Raised("audit HOME/dcp --sample 10%", "… requires level digest", "add (--level digest)",
           "audit HOME/dcp --sample 10% <1>"),
    Raised("audit HOME/dcp --check HOME/junk.json --anchor zzz", "invalid anchor …", COMMAND),
    Raised("ledger check --anchor zzz", "invalid anchor …: expected a hash of at least … hex digits, or a file",
           COMMAND),
    Raised("inspect HOME/converted --digest --write --filter a", "a sidecar describes all tensors",
           "leave out (--filter)", "inspect HOME/converted --digest --write"),
    Raised(f"inspect {ONE} --filter zzz", "no tensor matches …", COMMAND),
    Raised("verify HOME/converted --on processes:1", "an engine reads one checkpoint at level digest",
           "pass (--level digest)", "verify HOME/converted --on processes:1 <1>"),
    Raised(f"verify {ONE} --level roundtrip", "level roundtrip needs a source to compare with",
           "pass (--against) SOURCE",
           f"verify {ONE} --level roundtrip <1> {ONE}"),
    Raised(f"verify {ONE} --level logits", "level … needs a source to compare with", "pass (--against) SOURCE",
           f"verify {ONE} --level logits <1> {ONE}", 7),
    Raised(f"verify {MODEL} --level native --tokens 4", "level … generates no tokens", "leave out --tokens",
           f"verify {MODEL} --level present"),
    Raised(f"verify {MODEL} --level serve --against {MODEL} --tokens 0", "invalid number of tokens: …",
           "write for example (--tokens 32)", f"verify {MODEL} --level serve --against {MODEL} <1>"),
    Raised(f"verify {MAXTEXT} --level serve --against {MODEL}",
           "transformers serves Hugging Face folders with a config, and this checkpoint is none",
           "pass (--level logits)", f"verify {MAXTEXT} <1> --against {MODEL}"),
    Raised("verify HOME/torch.pt --level native --allow-opaque a.b.C",
           "level … cannot skip …: the system's own library would call what the pickle names",
           "pass (--level digest)", "verify HOME/torch.pt <1> --allow-opaque a.b.C"),
    Raised(f"detect {MAXTEXT} --step 7", "step … not found", COMMAND),
    Raised(f"detect {ONE}r", "file or folder not found", COMMAND),
    Raised("detect file://tmp/of-nobody/x", "… names the host …; expected a path of this machine", "write file://(/tmp/of-nobody/x)",
           "detect <1>", 3),
    Raised("detect az://c@acc.dfs.core.windows.net/p",
           "… names the storage account …; a URI of wherry names only the container",
           r"set (\S+=\S+) and write (az://\S+)", "<1> detect <2> --help"),
    Raised("inspect HOME/.wherry-0123456789abcdef-left", "staging area of an unfinished conversion", COMMAND),
    Raised("verify HOME/several", "not a checkpoint of any known format", COMMAND),
    Raised("verify blake3:00000000", "no checkpoint with this digest in the ledger", COMMAND),
    Raised("formats orbx", "unknown format …", "did you mean (orbax)", "formats <1>"),
    Raised("clean https://h/x", "…:// has no staging areas to clean", "pass a (local folder)", "clean HOME/empty"),
    # jobs
    Raised("work HOME/nothing", "no job found", r"`wherry (split) SOURCE TARGET (--to) FORMAT`",
           f"<1> {ONE} HOME/new <2> dcp"),
    Raised("split HOME/dcp HOME/jobbed --to orbax", "a job of another conversion to this target exists, with …",
           COMMAND, ends=5),
    Raised("commit HOME/jobbed", "… of … are not written: ……", COMMAND),
    Raised("work HOME/jobbed --expiry x", "invalid duration …", "for example 900, (15m)",
           "work HOME/jobbed --expiry <1>"),
    Raised("split HOME/dcp HOME/new --to dcp", "WHERRY_KEY is shorter than … characters", "(export WHERRY_KEY=.*)",
           "<1>; wherry split HOME/dcp HOME/new --to dcp", where={"WHERRY_KEY": "abc"}),
    Raised("split HOME/dcp HOME/newer --to dcp",
           "the processes of a job need one key, and WHERRY_HOME (…) has none that can be used",
           "(export WHERRY_KEY=.*)",
           "<1>; wherry split HOME/dcp HOME/newer --to dcp", where={"WHERRY_HOME": "/dev/null/home"}),
    # models and signatures
    Raised(f"register {ONE} --model x", "no digests are recorded for this checkpoint, so it cannot be verified",
           COMMAND),
    Raised("promote HOME/converted", "missing name of the registered model", "add (--model) NAME",
           "promote HOME/converted <1> pasted"),
    Raised("promote pasted --rollback --model x",
           "--rollback cannot be combined with --model, --policy or --to-registry-uri",
           "leave these out", "promote models:/pasted --rollback", 3),
    Raised("promote models:/pasted --rollback", "no previous version of alias … of …",
           r"`wherry (promote) URI (--model pasted)`", "<1> HOME/converted <2>"),
    Raised("resolve models:/lonely@nope", "unknown alias … of …",
           r"`wherry (promote) URI (--model lonely --alias nope)`", "<1> HOME/dcp <2>"),
    Raised("resolve pasted", "invalid model URI: …", r"did you mean (\S+)\?", "resolve <1>"),
    Raised("resolve models:/paste", "", r"did you mean (\S+)\?", "resolve models:/<1>"),
    Raised("fetch models:/pasted/9 HOME/new", "", r"choose one of: (\d)", "fetch models:/pasted/<1> HOME/new"),
    Raised("verify-signature HOME/dcp --key HOME/public.pem", "signature not found",
           r"`wherry (sign) URI (--key) KEY`",
           "<1> HOME/dcp <2> HOME/key.pem"),
    Raised("verify-signature HOME/dcp --key HOME/key.pem",
           "this is a private key; a signature is checked with the public key",
           "`(openssl [^`]+)`", "cd HOME/empty && <1>"),
    Raised("sign HOME/dcp --key HOME/public.pem", "this is a public key; a signature is made with the private key",
           "its first line has the words PRIVATE KEY", "sign HOME/dcp --key HOME/key.pem"),
    Raised("promote HOME/converted --model pasted --policy nope", "unknown policy …: missing table [policy.…]", "(.*)",
           "promote HOME/converted --model pasted"),
    # configuration and ledger
    Raised("nightly", "no configuration found", "pass (--config) FILE", "nightly --dry-run <1> HOME/wherry.toml"),
    Raised("routes check --config HOME/junk.json", "invalid TOML: …", COMMAND),
    Raised("routes check --config HOME/nope.toml", "configuration file not found", "check the path in (--config)",
           "routes check <1> HOME/wherry.toml"),
    Raised("nightly --config HOME/wherry.toml --env prod", "unknown environment …: missing table [env.…]", "(.*)",
           "nightly --dry-run --config HOME/wherry.toml"),
    Raised("init --yes", "missing option '--root'", "pass (--root) URI",
           "init --yes <1> HOME --config HOME/new.toml"),
    Raised("init --yes --root HOME --config HOME/wherry.toml", "the configuration exists already",
           "give (--config) FILE for another", "init --yes --root HOME <1> HOME/new.toml"),
    Raised(DCP, "invalid value for WHERRY_SETTLE_SECONDS: …; expected seconds from 0 to 86400",
           r"for example (WHERRY_SETTLE_SECONDS=\d)", f"<1> {DCP}", where={"WHERRY_SETTLE_SECONDS": "x"}),
    Raised("audit HOME/dcp", "invalid value of WHERRY_AUDIT_RECORD: …; expected true or false",
           "correct or (unset) it",
           "audit HOME/dcp", where={"WHERRY_AUDIT_RECORD": "x"}),
    Raised("ls", "unsupported ledger database; expected SQLite or PostgreSQL",
           "set (WHERRY_LEDGER) to (sqlite:///)/absolute",
           "<1>=<2>HOME/l.db ls", where={"WHERRY_LEDGER": "mysql://h/x"}),
    Raised("ls", "unsupported ledger driver …", "use (postgresql)://", "ls --help",
           where={"WHERRY_LEDGER": "postgresql+foo://h/x"}),
    Raised("ledger deliver openlineage", "no destination is configured for …", "set (WHERRY_OPENLINEAGE) to a file",
           "<1>=HOME/empty/l.jsonl ledger deliver openlineage"),
    Raised("ledger deliver openlineage",
           "invalid destination of OpenLineage events; expected a file or an http(s) URL",
           "for example (WHERRY_OPENLINEAGE)=", "<1>=HOME/empty/l.jsonl ledger deliver openlineage",
           where={"WHERRY_OPENLINEAGE": "nonsense:/x"}),
    Raised("ledger deliver foo", "unknown projection …", "choose (openlineage) or",
           "WHERRY_OPENLINEAGE=HOME/empty/l.jsonl ledger deliver <1>"),
    Raised("ledger rebuild HOME/dcp", "the ledger is not empty; rebuild writes only to an empty ledger",
           "name a new one in WHERRY_LEDGER or with (--ledger)",
           "ledger rebuild HOME/dcp <1> sqlite:///HOME/empty/rebuilt.db"),
    Raised("deploy --limit x", "invalid value for --limit: …; expected NAME=SLOTS", "for example (--limit s3-runs=4)",
           "deploy <1>", 2),
    Raised("ls", "the ledger cannot be used: not a regular file", "set (WHERRY_LEDGER) to (sqlite:///)/absolute",
           "<1>=<2>HOME/empty/l.db ls", where={"WHERRY_LEDGER": "sqlite:////dev"}),
    Raised("ls", "invalid ledger URL: it cannot be parsed", "set (WHERRY_LEDGER) to (sqlite:///)/absolute",
           "<1>=<2>HOME/empty/l.db ls", where={"WHERRY_LEDGER": "postgresql://h:port/x"}),
    Raised("ls", "invalid ledger URL: a file of SQLite has no options", "set (WHERRY_LEDGER) to (sqlite:///)/absolute",
           "<1>=<2>HOME/empty/l.db ls", where={"WHERRY_LEDGER": "sqlite:////dev/l.db?timeout=5"}),
    Raised(f"convert {MODEL} HOME/new.gguf --to gguf", "missing …: a GGUF file has the tokenizer of its model",
           "leave it out with --set (tokenizer=none)", f"convert {MODEL} HOME/new.gguf --to gguf --set <1>"),
    Raised("resolve models:/pasted", "the MLflow URI contains credentials", "set (MLFLOW_TRACKING_USERNAME) and",
           "<1>=me resolve models:/pasted", where={"MLFLOW_TRACKING_URI": "http://me:secret@127.0.0.1:9"}),
    Raised("deploy", "no Prefect server configured", "`(prefect server start)` and set (PREFECT_API_URL)",
           "deploy --help"),
    Raised("init", "cannot ask: standard input has ended", r"`wherry (init --root) URI (--yes)`",
           "<1> HOME <2> --config HOME/new.toml"),
    Raised("sign HOME/dcp --key HOME/junk.json", "cannot load the key", "pass a (PEM) file",
           "sign HOME/dcp --key HOME/key.pem"),
    Raised(f"convert {ONE} HOME/new --to orbax --set axes=HOME/list.toml", "axes: expected a table of lists",
           "write for example .* = (.*)$", f"{ORBAX} --set axes=HOME/named.toml"),
    Raised(f"{DCP} --into", "… has no naming rule for the steps of a run", "leave out (--into)", DCP),
    Raised(f"convert {ONE} HOME/new --to penzai --set rules=embed",
           "invalid rules: missing ':' between an axis name and its mesh axes", r"for example (rules=\S+)",
           f"convert {ONE} HOME/new --to penzai --set <1>", 2),
    Raised(f"{TO_MAXTEXT} --dtype int4", "cannot … from … to …: it needs floating point", "another (--dtype),",
           f"{TO_MAXTEXT} <1> bf16"),
    Raised(f"{TO_MAXTEXT} --set tied=true", "tied=true is stated, but … differs from …", "state (--set tied=false)",
           f"{TO_MAXTEXT} <1>"),
    Raised(f"merge {MAXTEXT}*0.5 {MODEL}*0.5 HOME/new --to orbax", "… of only one of … and …: …",
           "`wherry (diff) A B`", f"<1> {MAXTEXT} {MODEL}"),
    Raised(f"convert {ONE} HOME/new.safetensors --to dcp --family-file HOME/junk.json", "cannot read …: …",
           "pass a (TOML) file", DCP),
    Raised("convert HOME/objects.pt HOME/new --to npz", "the pickle imports … at byte …, which is not allowed",
           COMMAND),
    Raised("inspect HOME/lfs", "… is a git-lfs pointer, not the file itself", "`(git lfs pull)`", "detect HOME/lfs", 5),
    Raised("--storage-timeout soon ls", "invalid duration …", "(15m)", "--storage-timeout <1> ls"),
    Raised("--storage-timeout 0 ls", "invalid storage_timeout …: expected more than 0", "for example (60s)",
           "--storage-timeout <1> ls"),
    Raised("ledger check --ledger sqlite:///HOME/another.db", "the ledger has schema …, but this wherry requires …",
           "`wherry (ledger rebuild) ROOT`", "<1> HOME/dcp --no-registry --ledger sqlite:///HOME/rebuilt.db"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory, own_home):
    """Checkpoints of several kinds, one of them registered, a job, a staging area, keys and a wherry.toml."""
    folder = tmp_path_factory.mktemp("raised")
    small(folder / "one.safetensors")
    save_tiny(folder / "model", "llama")
    save_tiny(folder / "neox", "gptneox")
    wherry.convert(folder / "model", folder / "coded", to="huggingface", options={"quantize": "fp8"})
    mixed(folder / "model", folder / "mixed")
    wherry.convert(folder / "one.safetensors", folder / "dcp", to="dcp")
    wherry.convert(folder / "one.safetensors", folder / "torch.pt", to="torch-zip")
    wherry.convert(folder / "model", folder / "converted", to="orbax")
    wherry.convert(folder / "model", folder / "maxtext", to="maxtext")
    wherry.register(folder / "converted", "pasted")
    wherry.register(folder / "dcp", "lonely")
    for name in ("one", "two"):
        small(folder / "several" / name / "model.safetensors")
    (folder / "empty").mkdir()
    (folder / ".wherry-0123456789abcdef-left").mkdir()
    (folder / "objects.pt").write_bytes(pickle.dumps({"w": os.getcwd}))
    (folder / "lfs").mkdir()
    (folder / "lfs" / "model.safetensors").write_text(LFS)
    (folder / "named.toml").write_text('[axes]\na = ["x", "y"]\n')
    (folder / "list.toml").write_text("axes = [1]\n")
    with closing(sqlite3.connect(folder / "another.db")) as connection:
        connection.execute("PRAGMA user_version = 3")
    (folder / "junk.json").write_text('{"a": 1}')
    (folder / "axes.toml").write_text('[axes]\n"nothing/*" = ["embed"]\n')
    (folder / "wherry.toml").write_text(
        f'[routes.r]\nroot = "{folder}/model"\nmin_age = 0\n'
        f'targets = [{{ format = "orbax", uri = "{folder}/out/{{name}}" }}]\n'
    )
    for command in (
        "openssl ecparam -name prime256v1 -genkey -noout -out key.pem",
        "openssl ec -in key.pem -pubout -out public.pem",
    ):
        subprocess.run(shlex.split(command), check=True, capture_output=True, cwd=folder)
    return folder


def mixed(source, target):
    """A model of which one projection has another element type."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    tensors, name = load_file(target / "model.safetensors"), "model.layers.0.self_attn.k_proj.weight"
    save_file({**tensors, name: tensors[name].half()}, target / "model.safetensors")


@pytest.fixture
def home(folder, monkeypatch, capfd, request):
    """The folder, seen from another working folder; what a test adds to it is removed again."""
    before = set(folder.iterdir())
    monkeypatch.chdir(folder / "empty")
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115, PTH123  closed with the process
    if "HOME/jobbed" in request.node.callspec.params["row"].line:
        assert typed(f"split {ONE} HOME/jobbed --to dcp", folder, capfd)[0] == 0
    yield folder
    for path in set(folder.iterdir()) - before:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in (folder / "empty").iterdir():
        path.unlink()


def pasted(line, home, capfd, patch):
    """The exit code and output of what is typed next: a command of wherry, with variables before it, or any other."""
    if line.startswith(("export ", "cd ", "openssl ")):
        function = f'wherry() {{ {shlex.quote(sys.executable)} -m wherry.cli "$@"; }}'
        script = f"{function}; {line.replace('HOME', str(home))}"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr
    while found := re.match(r"([A-Z_]+)=(\S+) ", line):
        patch.setenv(found[1], found[2].replace("HOME", str(home)))
        line = line[found.end() :]
    return typed(line, home, capfd)


def named(row):
    return " ".join([row.line, *row.where.values()])


@pytest.fixture
def no_server(row):
    """For commands that use Prefect: a server that other tests of this process have started is not configured."""
    if not row.line.startswith("deploy"):
        yield
        return
    settings = pytest.importorskip("prefect.settings")
    with settings.temporary_settings(restore_defaults={settings.PREFECT_API_URL}):
        yield


@pytest.mark.usefixtures("no_server")
@pytest.mark.parametrize("row", ROWS, ids=named)
def test_a_cure_that_is_pasted_ends_the_error(row, home, capfd):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in row.where.items():
            patch.setenv(name, value)
        code, text = typed(row.line, home, capfd)
    assert code, text
    stated = re.search(r"error: (.*)\ncure: (.*)$", text, re.MULTILINE)
    assert stated, text
    error, cure = stated.groups()
    assert matches(row.what, error), f"{row.what}\n{error}"
    taken = re.search(row.taken, cure)
    assert taken, cure
    line = row.then
    for number, group in enumerate(taken.groups(), 1):
        line = line.replace(f"<{number}>", group)
    with pytest.MonkeyPatch.context() as patch:
        code, text = pasted(line, home, capfd, patch)
    assert code == row.ends, f"{line}\n{text}"
    assert f"error: {error}" not in text, "the same error"


def matches(what, error):
    """Whether an error is one of these, with anything for `…`."""
    pattern = ".*".join(map(re.escape, re.split("…+", what)))
    return not what or re.match(pattern, error) is not None


PLACES = [
    "convert HOME/{x}/one.safetensors HOME/{x}/new --to dcp --rename 'zzz -> b'",
    "verify HOME/{x}/gone",
    "detect HOME/{x}/dcp --step 7",
    "register HOME/{x}/one.safetensors --model n",
    "inspect HOME/{x}/one.safetensors --filter zzz",
    "convert HOME/{x}/dcp HOME/{x}/new --to orbax --item nope",
    "detect HOME/{x}/.wherry-0123456789abcdef-left",
    "commit HOME/{x}/jobbed",
    "split HOME/{x}/dcp HOME/{x}/jobbed --to orbax",
    "resolve 'models:/{name}@nope'",
    "convert HOME/{x}/dcp 'models:/{name}' --to dcp",
    "verify-signature HOME/{x}/dcp --key HOME/{x}/key.pem",
]


@pytest.mark.parametrize("line", PLACES)
def test_a_name_with_a_second_command_stays_one_word_of_a_cure(line, tmp_path, capfd):
    """`x; y` in the place of every name: a cure that is pasted runs one command, on that name."""
    place = tmp_path / "x; y"
    small(place / "one.safetensors")
    wherry.convert(place / "one.safetensors", place / "dcp", to="dcp")
    (place / ".wherry-0123456789abcdef-left").mkdir()
    subprocess.run(
        ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", place / "key.pem"],
        check=True,
        capture_output=True,
    )
    assert typed("split 'HOME/x; y/dcp' 'HOME/x; y/jobbed' --to dcp", tmp_path, capfd)[0] == 0
    if "models:" in line:
        wherry.register(place / "dcp", "x; y")
    typed_line = re.sub(r"(HOME/\{x\}\S*)", r"'\1'", line).replace("{x}", "x; y").replace("{name}", "x; y")
    code, text = typed(typed_line, tmp_path, capfd)
    assert code, text
    cure = text.rpartition("cure: ")[2]
    commands = [
        found for found in re.findall(r"`((?:wherry|openssl) (?:'[^']*'|[^`'])*)`", cure) if "x" in found
    ]
    assert any("x; y" in command for command in commands), cure
    for command in commands:
        words = list(shlex.shlex(command, posix=True, punctuation_chars=True))
        assert ";" not in words, command


COMPUTED = {
    "",
    "… has no layout for …",
    "unknown format …",
    "… cannot hold …",
}  # texts that the page has not, or not so
UNPASTED = tomllib.loads((ROOT / "tests" / "cli" / "unpasted_cures.toml").read_text())
# What a user can paste: a command or an option, a variable, an argument of Python.
PASTABLE = re.compile(r"`[a-z-]|--[a-z]|\b[A-Z]+_[A-Z_]+|\b[a-z_]+=")


def catalogue():
    """Error and cure of each row of docs/reference/errors.md."""
    for line in PAGES["reference/errors"].splitlines():
        cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
        if line.startswith("| ") and len(cells) == 2:
            what, cure = (cell.strip().replace("&lt;", "<").replace("\\|", "|") for cell in cells)
            yield what, cure


def test_every_cure_that_can_be_pasted_is():
    """Each of them has a row above, or is listed with the reason why not."""
    known = {what for what, cure in catalogue() if PASTABLE.search(cure)}
    rows = {row.what for row in ROWS}
    listed = [what for names in UNPASTED.values() for what in names]
    assert len(listed) == len(set(listed))
    assert known - rows - set(listed) == set(), "without a row"
    assert set(listed) - known == set(), "no longer in the catalogue"
    assert rows & set(listed) == set(), "has a row"
    assert rows <= {what for what, _cure in catalogue()} | COMPUTED
