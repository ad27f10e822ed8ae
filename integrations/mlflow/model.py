"""model: a registered version as an MLflow model, without a byte added to the registered checkpoint.

The source of a version is `wherry://ALGORITHM/DIGEST`, and MLflow's artifact repository for this scheme is here. It
shows the folder that MLflow's loaders read, of which storage has only the checkpoint:

    MLmodel                the flavors, the signature, the digests; computed
    model/                 the checkpoint with its record, copied and proved as `wherry fetch` does
    components/tokenizer/  the companion files once more, where transformers can load it

A folder of a causal language model, as transformers saves it, has MLflow's flavor `transformers` and generates text.
Every other checkpoint has only `python_function`, whose raw model is the opened checkpoint, without the model's code.

MLflow's note `registered_model_meta` is written next to the MLmodel, so it is never in a checkpoint's folder.

Facts (MLflow 3.17): a class that transformers does not have is loaded with `trust_remote_code`, from the `auto_map` of
config.json; a model with one therefore does not get the flavor.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import mlflow
from mlflow import pyfunc
from mlflow.entities import FileInfo
from mlflow.models import Model, ModelSignature
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.types.schema import ColSpec, DataType, ParamSchema, ParamSpec, Schema
from mlflow.utils.file_utils import create_tmp_dir

from wherry.config.roots import root_of
from wherry.core.digest import digest_uri
from wherry.core.json_document import parse_json
from wherry.core.limits import SMALL
from wherry.core.request import SourceRequest
from wherry.cures import Argument, Blank, Command, Cure
from wherry.errors import MismatchError, UsageError
from wherry.formats.checkpoint import Checkpoint
from wherry.formats.file_names import is_weights
from wherry.integrations.mlflow.read import find_digest
from wherry.integrations.mlflow.runs import LOGGED_MODEL_TAG
from wherry.ledger.resolve import DIGEST_TAG, WEIGHTS_TAG, open_checkpoint, proved_sidecar, resolve_model
from wherry.models.fetch import Original, copy_proved, find_original
from wherry.store.local_store import locate
from wherry.store.location import MOST_CONFIG
from wherry.store.open_file import write_regular

_MLMODEL, _MODEL, _TOKENIZER = "MLmodel", "model", "components/tokenizer"
_CONFIG, _TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
_CAUSAL = re.compile(r"[A-Za-z0-9_]+ForCausalLM")
_PIPELINE_LENGTH = (
    256  # tokens that the pipeline generates, and it samples, unless generation_config.json says more
)
_TEXT = Schema([ColSpec(DataType.string)])


class CheckpointRepository(ArtifactRepository):
    """MLflow's view of one registered checkpoint; it is read only."""

    @cached_property
    def _stores(self) -> dict[str, str]:
        return {
            "tracking_uri": self.tracking_uri or mlflow.get_tracking_uri(),
            "registry_uri": self.registry_uri or mlflow.get_registry_uri(),
        }

    @cached_property
    def _original(self) -> Original:
        found = resolve_model(self.artifact_uri, **self._stores)
        original = find_original(SourceRequest(found.uri, below=root_of(found.uri)))
        if original.sidecar.checkpoint.checkpoint_digest != found.checkpoint_digest:
            raise MismatchError("another checkpoint was put at this location meanwhile", uri=found.uri)
        return original

    @cached_property
    def _config(self) -> dict[str, Any] | None:
        """The config of a model that MLflow's flavor `transformers` can load without code of the checkpoint."""
        original = self._original
        is_folder = original.location.path == original.base.path
        if (
            not is_folder
            or original.sidecar.checkpoint.format != "huggingface"
            or not self._json(_TOKENIZER_CONFIG)
        ):
            return None
        config = self._json(_CONFIG)
        named = config.get("architectures")
        is_causal = isinstance(named, list) and named and _CAUSAL.fullmatch(str(named[0]))
        return config if is_causal and "auto_map" not in config else None

    def _json(self, name: str) -> dict[str, Any]:
        """A companion file that is a JSON table; empty if there is none."""
        if all(
            one.name != name or one.size > MOST_CONFIG for one in self._original.sidecar.manifest.companions
        ):
            return {}
        found = parse_json(
            b"".join(self._companion(name)), name, uri=self._original.location.uri, limits=SMALL
        )
        return found if isinstance(found, dict) else {}

    @cached_property
    def _mlmodel(self) -> str:
        subject, receipt = self._original.sidecar.checkpoint, self._original.sidecar.receipt
        row = find_digest(subject.checkpoint_digest, **self._stores)
        model = Model(
            model_id=row.tags.get(LOGGED_MODEL_TAG) if row else None,
            utc_time_created=receipt.finished if receipt else None,
            model_size_bytes=sum(entry.size for entry in self._original.files),
            metadata={DIGEST_TAG: subject.checkpoint_digest, WEIGHTS_TAG: subject.weights_digest},
        )
        if self._config is None:
            location, base = self._original.location, self._original.base
            data = _MODEL if location.path == base.path else f"{_MODEL}/{location.name}"
            pyfunc.add_to_model(model, loader_module=__name__, data=data)
            return model.to_yaml()
        stated = self._json("generation_config.json")
        length, samples = stated.get("max_new_tokens"), stated.get("do_sample")
        params = [
            ParamSpec("max_new_tokens", DataType.long, length if type(length) is int else _PIPELINE_LENGTH),
            ParamSpec("do_sample", DataType.boolean, samples if type(samples) is bool else True),
        ]
        model.signature = ModelSignature(_TEXT, _TEXT, ParamSchema(params))
        model.add_flavor(
            "transformers",
            task="text-generation",
            instance_type="TextGenerationPipeline",
            framework="pt",
            pipeline_model_type=str(self._config["architectures"][0]),
            source_model_name=digest_uri(subject.checkpoint_digest),
            model_binary=_MODEL,
            components=["tokenizer"],
            tokenizer_type="AutoTokenizer",
        )
        pyfunc.add_to_model(model, loader_module="mlflow.transformers", model_binary=_MODEL)
        return model.to_yaml()

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """Name → size of every file of the model."""
        original = self._original
        sizes = {_MLMODEL: len(self._mlmodel.encode())}
        sizes |= {f"{_MODEL}/{entry.name}": entry.size for entry in original.files}
        if self._config is not None:
            companions = original.sidecar.manifest.companions
            sizes |= {f"{_TOKENIZER}/{one.name}": one.size for one in companions if not is_weights(one.name)}
        return sizes

    def _companion(self, name: str) -> Iterator[bytes]:
        """The bytes of a companion file; the end is reached only if they have the recorded digest."""
        original = self._original
        digest, place = hashlib.sha256(), original.base.member(name)
        for piece in place.pieces():
            digest.update(piece)
            yield piece
        if digest.hexdigest() != {one.name: one.sha256 for one in original.sidecar.manifest.companions}[name]:
            raise MismatchError(
                "the copy differs from the record: digest mismatch in a companion file",
                uri=original.location.uri,
                path=name,
                cure=Cure(
                    "run {} to check the original",
                    Command("verify", original.location.uri, Argument("level", "digest")),
                ),
            )

    def list_artifacts(self, path: str | None = None) -> list[FileInfo]:
        """The files and folders directly below a folder of the model; none below a file."""
        prefix = f"{path.strip('/')}/" if path else ""
        rows: dict[str, FileInfo] = {}
        for name, size in self._sizes.items():
            if name.startswith(prefix):
                head, slash, _ = name.removeprefix(prefix).partition("/")
                rows[head] = FileInfo(prefix + head, bool(slash), None if slash else size)
        return [rows[head] for head in sorted(rows)]

    def download_artifacts(self, artifact_path: str | None, dst_path: str | None = None) -> str:
        """Copy the model or a part of it to a local folder.

        Args:
            artifact_path: the part; the whole model if it is empty.
            dst_path: an existing folder; a new one by default.

        Returns:
            The path of the part in the folder.

        Raises:
            MismatchError: the checkpoint differs from the registered one; nothing of it is left.
            TargetExistsError: the folder has another checkpoint.
            MlflowException: a part cannot be copied.
        """
        part = (artifact_path or "").strip("/")
        if part not in ("", _MODEL):
            return super().download_artifacts(part, dst_path)
        folder = str(Path(dst_path or create_tmp_dir()).absolute())
        place = locate(folder).join(_MODEL)
        copy_proved(
            self._original, place.join(self._original.location.name) if self._original.is_file else place
        )
        for name in self._sizes if not part else ():
            if not name.startswith(f"{_MODEL}/"):
                self._download_file(name, self._create_download_destination(name, folder))
        return str(Path(folder, part))

    def _download_file(self, remote_file_path: str, local_path: str) -> None:
        """Write one file of the model.

        Raises:
            UsageError: it holds tensors, whose digests are not those of files.
            MismatchError: it differs from the record.
        """
        target = Path(local_path)
        if remote_file_path == _MLMODEL:
            target.write_text(self._mlmodel)
            return
        name = remote_file_path.removeprefix(f"{_TOKENIZER}/").removeprefix(f"{_MODEL}/")
        if name not in {one.name for one in self._original.sidecar.manifest.companions}:
            raise UsageError(
                f"cannot prove {remote_file_path} alone: tensors are compared with the record together",
                uri=self.artifact_uri,
                cure="download the whole model",
            )
        try:
            write_regular(local_path, self._companion(name))
        except BaseException:
            target.unlink(missing_ok=True)
            raise

    def log_artifact(self, *_positional: Any, **_named: Any) -> NoReturn:
        """Refused: a registered checkpoint is never changed.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "a registered checkpoint cannot be changed",
            uri=self.artifact_uri,
            cure="register another checkpoint as a new version",
        )

    log_artifacts = delete_artifacts = log_artifact


class LoadedCheckpoint:
    """What `mlflow.pyfunc.load_model` loads of a checkpoint without MLflow's flavor of its own."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Args: checkpoint: opened."""
        self._checkpoint = checkpoint

    def get_raw_model(self) -> Checkpoint:
        """The opened checkpoint: `get_raw_model()["layers/0/kernel"]` of the loaded model is a tensor."""
        return self._checkpoint

    def predict(self, _data: Any) -> NoReturn:
        """Refused: a checkpoint has tensors, but no code that computes with them.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"a {self._checkpoint.detection.format} checkpoint has no code that predicts",
            uri=self._checkpoint.uri,
            cure=Cure(
                "read tensors from get_raw_model(), or register a causal language model that is converted with its "
                "tokenizer: {}",
                Command("convert", self._checkpoint.uri, Blank("TARGET"), Argument("to", "huggingface")),
            ),
        )


def _load_pyfunc(path: str) -> LoadedCheckpoint:  # pyright: ignore[reportUnusedFunction]  MLflow calls it by this name
    """Open a downloaded checkpoint, in the recorded format, whatever its name."""
    format_name = proved_sidecar(locate(path), "open").checkpoint.format
    return LoadedCheckpoint(open_checkpoint(path, format=format_name))
