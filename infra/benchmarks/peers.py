"""The other peers: Orbax, transformers, mergekit, model-signing, called as their documentation says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.files import make_durable

_BIN = Path(sys.executable).parent


def safetensors_to_orbax(source: str, target: str) -> Callable[[], None]:
    """Load every shard with safetensors, save the whole with StandardCheckpointer."""
    import orbax.checkpoint as ocp
    from safetensors.flax import load_file

    def run() -> None:
        tree = {}
        for shard in sorted(Path(source).glob("*.safetensors")):
            tree |= load_file(shard)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(Path(target).resolve(), tree)
            checkpointer.wait_until_finished()
        make_durable(Path(target))

    return run


def orbax_to_safetensors(source: str, target: str) -> Callable[[], None]:
    """Restore the whole with StandardCheckpointer, save it with safetensors."""
    import orbax.checkpoint as ocp
    from safetensors.flax import save_file

    def run() -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            tree = checkpointer.restore(Path(source).resolve())
        save_file(tree, target)
        make_durable(Path(target))

    return run


def transformers_reshard(source: str, target: str, part: str) -> Callable[[], None]:
    """from_pretrained, then save_pretrained with smaller shards."""
    from transformers import AutoModelForCausalLM

    def run() -> None:
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
        model.save_pretrained(target, max_shard_size=int(part))
        make_durable(Path(target))

    return run


def transformers_dequantize(source: str, target: str) -> Callable[[], None]:
    """from_pretrained of fp8 weights, dequantised to bfloat16, then save_pretrained in the names of its modules."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    def run() -> None:
        stated = json.loads((Path(source) / "config.json").read_text())["quantization_config"]
        wanted = FineGrainedFP8Config(
            dequantize=True, modules_to_not_convert=stated["modules_to_not_convert"]
        )
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", quantization_config=wanted)
        model.save_pretrained(target, save_original_format=False)  # it cannot undo the dequantisation
        make_durable(Path(target))

    return run


def mergekit_reshard(source: str, target: str, part: str) -> Callable[[], None]:
    """mergekit-yaml with a passthrough merge of one model; its shards are counted in numbers of two bytes."""
    recipe = Path(target).with_suffix(".yaml")
    recipe.write_text(f"merge_method: passthrough\ndtype: bfloat16\nmodels:\n  - model: {source}\n")
    options = ("--no-copy-tokenizer", "--out-shard-size", str(int(part) // 2))

    def run() -> None:
        subprocess.run([_BIN / "mergekit-yaml", recipe, target, *options], check=True)
        make_durable(Path(target))

    return run


def sign(source: str, target: str) -> Callable[[], None]:
    """Make the input `signed`: a model that wherry wrote, with its sidecar, signed by model-signing with BLAKE3.

    The command `model_signing` has no option for the algorithm and always hashes with SHA-256; its library has one.
    """
    import model_signing

    folder = Path(target)

    def run() -> None:
        folder.mkdir(parents=True)
        convert = (
            sys.executable,
            "-m",
            "wherry.cli",
            "convert",
            source,
            folder / "model",
            "--to",
            "huggingface",
        )
        subprocess.run([*convert, "--quiet"], check=True)
        private = _write_keys(folder)
        hashing = model_signing.hashing.Config().use_file_serialization(hashing_algorithm="blake3")
        signing = model_signing.signing.Config().use_elliptic_key_signer(private_key=private)
        signing.set_hashing_config(hashing).sign(folder / "model", folder / "model.sig")

    return run


def verify_signature(source: str) -> Callable[[], None]:
    """Verify the input `signed` with model-signing, which takes the algorithm from the signature."""
    import model_signing

    folder = Path(source)

    def run() -> None:
        verifying = model_signing.verifying.Config()
        verifying.use_elliptic_key_verifier(public_key=folder / "public.pem").verify(
            folder / "model", folder / "model.sig"
        )

    return run


def _write_keys(folder: Path) -> Path:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, pem = ec.generate_private_key(ec.SECP256R1()), serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / "private.pem").write_bytes(private)
    (folder / "public.pem").write_bytes(public)
    return folder / "private.pem"
