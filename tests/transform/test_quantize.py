"""Plain weights become codes and scales by closed rules, and come back within the stated bound."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.numpy import save_file as save_file_of_inverse
from safetensors.torch import load_file, save_file

import wherry
from tests.support.families import LLAMA, made
from tests.support.large import measured
from tests.support.quantized import FP8, INT4, MXFP4, fp8, int4, mxfp4, save_quantized
from tests.support.tiny_models import save_tiny
from tests.support.torch import as_bytes, torch
from wherry.core.request import LayoutRequest
from wherry.errors import AmbiguousError, MismatchError, UnrepresentableError, UnsupportedError, UsageError
from wherry.families import load_family
from wherry.transform.codes import largest_error
from wherry.transform.ggml import BOUNDS, encode_blocks, values_of
from wherry.transform.quantize import written_schemes

BLOCK = 32
convert = partial(wherry.convert, lineage=False)
RELEASES = {
    "fp8": ("deepseek-v3", FP8, fp8(16, 16)),
    "mxfp4": ("gpt-oss", MXFP4, mxfp4),
    "pack-quantized": ("qwen3-moe", INT4, int4(8)),
}
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
PLAIN = {
    "fp8": ("deepseek-v3", {}),
    "fp8-channel": ("qwen3-moe", {}),
    "mxfp4": ("gpt-oss", {}),
    "pack-quantized": (
        "qwen3-moe",
        {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32},
    ),
    "int8": ("llama", WIDE),
    "nvfp4": ("llama", WIDE),
    "mxfp4-packed": ("llama", WIDE),
}


def tensors(folder):
    return load_file(folder / "model.safetensors")


def same(one, other):
    kinds = [
        {name: (tensor.dtype, as_bytes(tensor)) for name, tensor in rows.items()} for rows in (one, other)
    ]
    return kinds[0] == kinds[1]


@pytest.mark.parametrize("scheme", sorted(RELEASES))
@pytest.mark.parametrize("way", ["maxtext", "huggingface"])
def test_what_we_dequantised_goes_back_bit_by_bit_with_the_kept_scales(scheme, way, tmp_path):
    source = save_quantized(tmp_path / "released", *RELEASES[scheme])
    options = {"dequantize": "bfloat16"} if way == "huggingface" else {}
    convert(source, tmp_path / "plain", to=way, options=options)
    again = {"quantize": scheme, "scales": str(source)}
    receipt = convert(tmp_path / "plain", tmp_path / "back", to="huggingface", options=again)
    assert receipt.lossless
    assert same(tensors(tmp_path / "back"), tensors(source))
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "back")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    assert wherry.verify(tmp_path / "back", level="roundtrip", against=str(tmp_path / "plain")).ok


@pytest.mark.parametrize("scheme", sorted(PLAIN))
def test_new_scales_are_within_the_bound_and_the_error_is_measured(scheme, tmp_path):
    label, settings = PLAIN[scheme]
    source = save_tiny(tmp_path / "plain", label, drawn=True, **settings)
    rule = written_schemes()[scheme][1]
    plan = wherry.plan(source, tmp_path / "x", to="huggingface", options={"quantize": scheme})
    assert {one.block for one in plan.lossy.values()} == {largest_error(rule.code, rule.scales or "float32")}
    receipt = convert(source, tmp_path / "codes", to="huggingface", options={"quantize": scheme})
    assert not receipt.lossless
    done = wherry.verify(tmp_path / "codes", level="roundtrip", against=str(source))
    assert done.ok
    assert done.measured.tensors == len(plan.lossy)
    assert 0.3 < done.measured.share <= 1
    convert(tmp_path / "codes", tmp_path / "back", to="huggingface", options={"dequantize": "float32"})
    errors = {name: (tensors(tmp_path / "back")[name].float() - one.float()).abs().max().item()
              for name, one in tensors(source).items()}  # fmt: skip
    assert max(errors.values()) == pytest.approx(done.measured.error, rel=1e-5)
    codes = written_schemes()[scheme][0].values
    named = {
        codes.format(name=name, module=name.removesuffix(".weight")): error for name, error in errors.items()
    }
    recorded = {one["path"]: one["error"] for one in receipt.losses}
    assert recorded == {name: pytest.approx(named[name], rel=1e-5) for name in recorded}
    assert recorded.keys() == {path[0] for path in plan.lossy}
    config = json.loads((tmp_path / "codes" / "config.json").read_text())["quantization_config"]
    assert "lm_head" in config[rule.modules]


@pytest.mark.parametrize("scheme", sorted(PLAIN.keys() - RELEASES.keys()))
def test_what_was_quantised_comes_back_with_its_own_scales(scheme, tmp_path):
    source = save_tiny(tmp_path / "plain", PLAIN[scheme][0], drawn=True, **PLAIN[scheme][1])
    convert(source, tmp_path / "codes", to="huggingface", options={"quantize": scheme})
    convert(tmp_path / "codes", tmp_path / "values", to="huggingface", options={"dequantize": "bfloat16"})
    again = {"quantize": scheme, "scales": str(tmp_path / "codes")}
    receipt = convert(tmp_path / "values", tmp_path / "back", to="huggingface", options=again)
    assert receipt.lossless
    made, wanted = tensors(tmp_path / "back"), tensors(tmp_path / "codes")
    assert made.keys() == wanted.keys()
    plain = [
        name for name in wanted if wanted[name].dtype == torch.float32 and made[name].dtype != torch.float32
    ]
    assert same({name: one for name, one in made.items() if name not in plain},
                {name: one for name, one in wanted.items() if name not in plain})  # fmt: skip
    assert wherry.verify(tmp_path / "back", level="roundtrip", against=str(tmp_path / "values")).ok


def one_matrix(folder, weight):
    folder.mkdir()
    save_file({"model.layers.0.mlp.up_proj.weight": weight}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "bfloat16"}))
    return folder


def hard_values(rows, columns):
    """Blocks of zeros, of one value, of large and of small numbers, and halfway points."""
    drawn = torch.randn(rows, columns, generator=torch.manual_seed(0))
    drawn[:128, :128] = 0
    drawn[128:256, :128] *= 1e30
    drawn[:128, 128:] *= 1e-30
    drawn[200, 130] = 448.0
    return drawn.to(torch.bfloat16)


def test_fp8_codes_and_scales_are_those_of_transformers(tmp_path):
    from types import SimpleNamespace

    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    weight = hard_values(256, 384)
    convert(one_matrix(tmp_path / "a", weight), tmp_path / "b", to="huggingface", options={"quantize": "fp8"})
    found = tensors(tmp_path / "b")
    settings = SimpleNamespace(
        quantization_config=SimpleNamespace(weight_block_size=[128, 128], scale_fmt=None)
    )
    wanted = Fp8Quantize(settings)._quantize_one("model.layers.0.mlp.up_proj.weight", weight)
    assert same(found, wanted)


def test_ragged_blocks_have_scales_of_their_own(tmp_path):
    weight = hard_values(300, 200)
    convert(one_matrix(tmp_path / "a", weight), tmp_path / "b", to="huggingface", options={"quantize": "fp8"})
    scales = tensors(tmp_path / "b")["model.layers.0.mlp.up_proj.weight_scale_inv"]
    assert scales.shape == (3, 2)
    last = weight[256:, 128:].float().abs().max() / 448
    assert scales[2, 1].item() == pytest.approx(last.item(), rel=1e-6)


def test_4_bit_floats_are_the_nearest_ones_with_halves_to_the_even_code():
    from wherry.transform.codes import encode, scale_values

    values = np.concatenate([np.linspace(-7.5, 7.5, 4001), np.arange(-6, 6.25, 0.25)]).astype("f4")
    scales = scale_values(np.full((1, 1), 127, "u1"), "float4_e2m1fn")
    found = encode(values[None], scales, "float4_e2m1fn")[0]
    wanted = values.astype(ml_dtypes.float4_e2m1fn).view("u1") & 15
    np.testing.assert_array_equal(found, wanted)


def test_integers_follow_the_rule_of_compressed_tensors(tmp_path):
    """compressed-tensors: scale = largest / 7.5, codes = round(value / scale) from -8 to 7."""
    weight = torch.randn(5, 64, generator=torch.manual_seed(1)).to(torch.bfloat16)
    convert(
        one_matrix(tmp_path / "a", weight),
        tmp_path / "b",
        to="huggingface",
        options={"quantize": "pack-quantized"},
    )
    found = tensors(tmp_path / "b")
    scales = found["model.layers.0.mlp.up_proj.weight_scale"]
    blocks = weight.float().reshape(5, 2, 32)
    assert torch.equal(scales, (blocks.abs().amax(2) / 7.5).to(torch.bfloat16))
    codes = (blocks / scales.float()[..., None]).round().clamp(-8, 7).to(torch.int64).reshape(5, 8, 8) + 8
    words = (codes << (4 * torch.arange(8))).sum(2)
    assert torch.equal(found["model.layers.0.mlp.up_proj.weight_packed"].long() & 0xFFFFFFFF, words)
    assert found["model.layers.0.mlp.up_proj.weight_shape"].tolist() == [5, 64]


NAME_OF_ONE = "model.layers.0.mlp.up_proj.weight"
MODULE = NAME_OF_ONE.removesuffix(".weight")


def observed(weight, top, group):
    """The scales of compressed-tensors' min-max observer: in the type of the weights, and no zero."""
    scales = weight.unflatten(-1, (-1, group)).abs().amax(-1) / top
    return torch.where(scales == 0, torch.finfo(weight.dtype).eps, scales)


def quantised(folder, weight, **options):
    convert(one_matrix(folder / "a", weight), folder / "b", to="huggingface", options=options)
    return tensors(folder / "b")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_8_bit_floats_have_a_scale_for_each_channel(dtype, tmp_path):
    weight = hard_values(256, 384).clamp(-1e3, 1e3).to(dtype)
    found = quantised(tmp_path, weight, quantize="fp8-channel")
    scales = observed(weight, 448, 384)
    codes = (weight.float() / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert same(found, {NAME_OF_ONE: codes, f"{MODULE}.weight_scale": scales})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_8_bit_integers_have_a_scale_for_each_group(group, dtype, tmp_path):
    weight = hard_values(256, 384).clamp(-1e3, 1e3).to(dtype)
    size = {} if group == 128 else {"group_size": group}
    found = quantised(tmp_path, weight, quantize="int8", **size)
    scales = observed(weight, 127.5, group)
    wide = weight.float() / scales.float().repeat_interleave(group, 1)
    codes = (wide.round().clamp(-128, 127) + 128).to(torch.uint8).view(torch.int32)
    made = {"weight_packed": codes, "weight_scale": scales, "weight_shape": torch.tensor([256, 384])}
    assert same(found, {f"{MODULE}.{name}": one for name, one in made.items()})
    stated = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    assert stated["config_groups"]["group_0"]["weights"]["group_size"] == group
    assert wherry.verify(tmp_path / "b", level="roundtrip", against=str(tmp_path / "a")).ok


def nibbles(scaled):
    """The nearest 4-bit floats, two in each byte; a zero has no sign."""
    codes = scaled.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).view("u1") & 15
    codes = np.where(scaled.numpy() == 0, 0, codes)
    return torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4)


def with_global_scale(weight, factor):
    """Packed codes and scales of a weight with a global scale."""
    largest = weight.unflatten(-1, (-1, 16)).abs().amax(-1)
    scales = ((largest / 6).float() * factor).clamp(max=448).to(torch.float8_e4m3fn)
    scales = torch.where(scales.float() == 0, 0.125, scales.float()).to(torch.float8_e4m3fn)
    wide = (scales.float() / factor).repeat_interleave(16, 1)
    return {
        "weight_packed": nibbles(weight.float() / wide),
        "weight_scale": scales,
        "weight_global_scale": factor,
    }


def factor_of(largest):
    """compressed-tensors: 448 × 6 over the largest magnitude, in the type of the weights unless that is float16."""
    return (2688.0 / (largest.float() if largest.dtype == torch.float16 else largest)).float().reshape(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_4_bit_floats_have_a_scale_for_16_and_one_for_the_tensor(dtype, tmp_path):
    weight = hard_values(256, 384).clamp(-1e3, 1e3).to(dtype)
    weight[:, 16:32] *= 1e-3
    weight[:, 32:48] *= 1e-6
    found = quantised(tmp_path, weight, quantize="nvfp4")
    made = with_global_scale(weight, factor_of(weight.abs().max()))
    assert same(found, {f"{MODULE}.{name}": one for name, one in made.items()})
    done = wherry.verify(tmp_path / "b", level="roundtrip", against=str(tmp_path / "a"))
    assert done.ok
    assert 0.8 < done.measured.share <= 1


def test_tensors_that_a_server_joins_share_their_global_scale(tmp_path):
    """vLLM has one global scale for the matrix of query, key and value: the largest of theirs."""
    draw = torch.manual_seed(0)
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
             "mlp.up_proj", "mlp.down_proj")  # fmt: skip
    weights = {
        f"model.layers.{layer}.{name}": torch.randn(16, 64, generator=draw).to(torch.bfloat16) * 4.0**number
        for layer in (0, 1)
        for number, name in enumerate(names, layer)
    }
    source = one_matrix(tmp_path / "a", torch.ones(16, 64))
    stored = {f"{name}.weight": one for name, one in weights.items()}
    save_file(stored, source / "model.safetensors", {"format": "pt"})
    convert(source, tmp_path / "b", to="huggingface", options={"quantize": "nvfp4"})
    found = tensors(tmp_path / "b")
    joined = [{"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}, {"o_proj"}, {"down_proj"}]
    for module, weight in weights.items():
        start, _dot, name = module.rpartition(".")
        members = next(one for one in joined if name in one)
        largest = torch.stack([weights[f"{start}.{one}"].abs().max() for one in members]).max()
        for part, wanted in with_global_scale(weight, factor_of(largest)).items():
            assert as_bytes(found[f"{module}.{part}"]) == as_bytes(wanted), (module, part)
    assert wherry.verify(tmp_path / "b", level="roundtrip", against=str(source)).ok


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_4_bit_floats_have_a_power_of_two_for_32(dtype, tmp_path):
    weight = hard_values(256, 384).clamp(-1e3, 1e3).to(dtype)
    weight[0, :8] = torch.tensor([1.0, 1.5, 1.74, 1.75, 1.76, 1.99, 2.0, 3.5]).to(dtype)
    found = quantised(tmp_path, weight, quantize="mxfp4-packed")
    largest = weight.float().unflatten(-1, (-1, 32)).abs().amax(-1)
    exponents = torch.floor(torch.log2(largest))
    exponents += largest >= 1.75 * torch.exp2(exponents)
    least = 2.0**-16 * 3 if dtype == torch.float16 else 0  # what float16 rounds to no power of two
    scales = torch.where(largest > least, (exponents - 2 + 127).clamp(0, 254), 127 if least else 0)
    wide = torch.exp2(scales - 127).repeat_interleave(32, 1)
    made = {"weight_packed": nibbles(weight.float() / wide), "weight_scale": scales.to(torch.uint8)}
    assert same(found, {f"{MODULE}.{name}": one for name, one in made.items()})
    done = wherry.verify(tmp_path / "b", level="roundtrip", against=str(tmp_path / "a"))
    assert done.ok
    assert 0.8 < done.measured.share <= 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("scheme", sorted(PLAIN.keys() - {"mxfp4"}))
def test_a_value_that_is_not_finite_is_refused(scheme, value, tmp_path):
    weight = torch.ones(128, 128)
    weight[3, 5] = value
    with pytest.raises(UnrepresentableError, match="not finite") as caught:
        quantised(tmp_path, weight, quantize=scheme)
    assert caught.value.path == NAME_OF_ONE
    assert not (tmp_path / "b").exists()


def test_changed_weights_are_no_codes_of_the_kept_scales(tmp_path):
    source = save_quantized(tmp_path / "released", *RELEASES["fp8"])
    convert(source, tmp_path / "plain", to="huggingface", options={"dequantize": "bfloat16"})
    held = tensors(tmp_path / "plain")
    held["model.layers.1.mlp.experts.0.up_proj.weight"] += 0.01
    save_file(held, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    with pytest.raises(MismatchError, match="kept scale"):
        convert(tmp_path / "plain", tmp_path / "back", to="huggingface",
                options={"quantize": "fp8", "scales": str(source)})  # fmt: skip
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("options", "to", "error", "words"),
    [
        ({"quantize": "int3"}, "huggingface", UsageError, "choose one of fp8"),
        ({"quantize": "fp8"}, "orbax", UsageError, "Hugging Face folder"),
        ({"scales": "x"}, "huggingface", UsageError, "Hugging Face folder"),
        ({"group_size": 64}, "huggingface", UsageError, "Hugging Face folder"),
        ({"quantize": "fp8", "group_size": 64}, "huggingface", UsageError, "group_size is fixed for fp8"),
        ({"quantize": "int8", "group_size": 48}, "huggingface", UsageError, "choose one of 32, 64, 128"),
        ({"quantize": "int8"}, "huggingface", UnrepresentableError, "whose inputs are a multiple of 128"),
        ({"quantize": "mxfp4"}, "huggingface", UnrepresentableError, "no tensor can be quantised with mxfp4"),
    ],
)
def test_what_cannot_be_quantised_is_refused(options, to, error, words, tmp_path):
    source = save_tiny(tmp_path / "plain", "llama")
    with pytest.raises(error, match=words) as caught:
        convert(source, tmp_path / "x", to=to, options=options)
    assert words in f"{caught.value}"
    assert not (tmp_path / "x").exists()


def test_codes_are_not_quantised_again(tmp_path):
    source = save_quantized(tmp_path / "released", *RELEASES["fp8"])
    with pytest.raises(UsageError, match="quantised already"):
        convert(source, tmp_path / "x", to="huggingface", options={"quantize": "fp8"})


@pytest.mark.slow
def test_a_large_matrix_is_quantised_in_bounded_memory(tmp_path):
    source = one_matrix(tmp_path / "a", torch.randn(18432, 7168).to(torch.bfloat16))
    run = """
import wherry
wherry.convert(sys.argv[1], sys.argv[2], to="huggingface", options={"quantize": "fp8"}, lineage=False)
result = None
"""
    _result, peak = measured(run, source, tmp_path / "b")
    assert peak <= 300 << 20


@pytest.mark.parametrize("scheme", sorted(PLAIN))
def test_any_region_is_that_part_of_the_whole(scheme, tmp_path, monkeypatch):
    """Regions that begin and end within blocks, words and bytes; a block's scale is that of all its values."""
    from wherry.transform import quantize as quantized
    from wherry.transform.quantize import quantised_view

    monkeypatch.setattr(quantized, "_BAND", 64)
    label, settings = PLAIN[scheme]
    source = save_tiny(tmp_path / "plain", label, drawn=True, **settings)
    draw = np.random.default_rng(0)
    with wherry.open(source) as checkpoint:
        view = quantised_view(checkpoint, scheme)
        made = [path for path in view.manifest.tensors if path not in checkpoint.manifest.tensors]
        made += [path for path, spec in view.manifest.tensors.items() if spec.dtype.startswith("float8")]
        for path in made[:12] + made[-12:]:
            spec = view.spec(path)
            whole = view.read(path).view("u1") if spec.dtype != "bfloat16" else view.read(path).view("u2")
            for _round in range(6):
                ends = [sorted(draw.integers(0, extent + 1, 2)) for extent in spec.shape]
                region = tuple(slice(int(start), int(stop)) for start, stop in ends)
                if 0 in [part.stop - part.start for part in region]:
                    continue
                part = view.read(path, region)
                wanted = np.ascontiguousarray(whole.view(part.dtype)[region])
                assert part.tobytes() == wanted.tobytes(), (path, region)


@pytest.mark.parametrize("scales", ["s3://other/x", "http://127.0.0.1:9/x", "gs://a/x", "memory://b/x"])
def test_a_record_opens_no_other_bucket_and_no_server(scales, monkeypatch):
    """The sidecar of a hostile folder would choose whom `verify --level roundtrip` asks."""
    from wherry.transform import quantize as quantized

    monkeypatch.setattr(quantized, "quantised_view", lambda *_args, **_more: pytest.fail("opened"))
    source = SimpleNamespace(uri="s3://bucket/x")
    with pytest.raises(UsageError, match="in another bucket"):
        quantized.as_quantised(source, {"quantized": {"scheme": "fp8", "scales": scales}})


@pytest.mark.parametrize("scales", ["/a/b", "file:///a/b", "s3://bucket/y", None])
def test_a_record_opens_what_lies_here_or_in_the_bucket_of_the_source(scales, monkeypatch):
    from wherry.transform import quantize as quantized

    monkeypatch.setattr(quantized, "quantised_view", lambda *args, **_more: args[1:])
    source, record = SimpleNamespace(uri="s3://bucket/x"), {"scheme": "fp8", "scales": scales}
    assert quantized.as_quantised(source, {"quantized": record}) == ("fp8", scales, None)


# What came back changed through the inverse is measured, and found where it is more than the plan
# allowed.


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def narrowed(tmp_path):
    """A Hugging Face Llama, and the same in bfloat16."""
    tensors = made(load_family("llama"), "huggingface", {}).tensors
    (tmp_path / "wide").mkdir()
    save_file_of_inverse(
        {path[0]: array for path, array in tensors.items()}, tmp_path / "wide" / "model.safetensors"
    )
    (tmp_path / "wide" / "config.json").write_text(json.dumps(LLAMA))
    wherry.convert(
        tmp_path / "wide", tmp_path / "narrow", to="huggingface", layout=LayoutRequest(dtype="bfloat16")
    )
    return tmp_path / "wide", tmp_path / "narrow"


def roundtrip(narrowed):
    wide, narrow = narrowed
    return wherry.verify(narrow, level="roundtrip", against=wide)


def test_a_cast_stays_within_its_bound(narrowed):
    found = roundtrip(narrowed)
    assert found.ok
    assert 0 < found.measured.share <= 1


def test_a_value_that_is_off_by_more_than_the_bound_is_found(narrowed):
    with wherry.open(narrowed[1]) as checkpoint:
        values = checkpoint.read(NAME).view("u2")
    file = narrowed[1] / "model.safetensors"
    data, raw = file.read_bytes(), values.tobytes()
    assert data.count(raw) == 1
    values[0, 0] ^= np.uint16(1 << 10)  # an eighth of the exponent's range
    file.write_bytes(data.replace(raw, values.tobytes()))
    reasons = [one.reason for one in roundtrip(narrowed).failed if one.path == NAME]
    assert any("its values differ by up to" in reason for reason in reasons)


def test_a_conversion_with_a_config_from_elsewhere_is_checked(narrowed, tmp_path):
    """Without its config nothing states how many heads the source has."""
    wide = narrowed[0]
    config = (wide / "config.json").rename(tmp_path / "config.json")
    target = tmp_path / "maxtext" / "0"
    with pytest.raises(AmbiguousError):
        wherry.convert(wide, target, to="maxtext", layout=LayoutRequest(family="llama"))
    wherry.convert(wide, target, to="maxtext", layout=LayoutRequest(family="llama", config=str(config)))
    assert wherry.verify(target, level="roundtrip", against=wide).ok


def forged(place, **layout):
    """The sidecar of a target, with another record of its layout."""
    file = place / "wherry.json"
    data = json.loads(file.read_text())
    origin = data["manifest"]["origin"]
    origin["layout"] = {**origin["layout"], **layout}
    file.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("layout", "words"),
    [({"family": 1}, "origin.layout.family"), ({"from": {}}, "missing origin.layout.from.system")],
    ids=str,
)
def test_a_layout_of_another_form_is_damage(layout, words, narrowed):
    forged(narrowed[1], **layout)
    found = roundtrip(narrowed)
    assert not found.ok
    assert words in found.failed[0].reason


@pytest.mark.parametrize(
    ("layout", "kind", "words"),
    [
        ({"family": "x"}, UsageError, "family 'x' was declared in a family file"),
        ({"to": {"system": "x"}}, UsageError, "family llama has no layouts for x"),
        ({"from": {"system": "huggingface", "x": "1"}}, UsageError, "unknown option 'x'"),
        ({"dtype": "int8"}, UnrepresentableError, "cannot cast from float32 to int8"),
        ({"dtype": "x"}, UnsupportedError, "numpy cannot represent dtype 'x'"),
    ],
    ids=str,
)
def test_a_layout_that_nobody_writes_is_refused(layout, kind, words, narrowed):
    forged(narrowed[1], **layout)
    with pytest.raises(kind, match=words):
        roundtrip(narrowed)


@pytest.mark.parametrize("dtype", ["int8", "bool", "int4", "uint64"])
def test_parameters_are_not_cast_to_integers(dtype, narrowed, tmp_path):
    with pytest.raises(UnrepresentableError, match=f"from float32 to {dtype}: it needs floating point"):
        wherry.convert(narrowed[0], tmp_path / "a", to="huggingface", layout=LayoutRequest(dtype=dtype))


# Blocks that are written have the bits that the `gguf` package gives them, and errors within their
# bounds.


gguf = pytest.importorskip("gguf")
# Those that the package quantises; tests/transform/test_gguf_blocks.py has blocks of 256 elements.
KINDS = sorted(kind for kind in BOUNDS if not kind.endswith("_K"))
MOST_HALF = 65504


def assert_as_package(values, kind, blocks):
    """Blocks have the bits of the package; not those of MXFP4 so small that its exponent does not fit into a byte."""
    with np.errstate(all="ignore"):
        wanted = gguf.quantize(values, gguf.GGMLQuantizationType[kind.removeprefix("ggml:")])
    largest = np.abs(values).max(axis=1)
    fits = (
        (largest == 0) | (largest >= 2.0**-125)
        if kind == "ggml:MXFP4"
        else np.full(len(values), fill_value=True)
    )
    np.testing.assert_array_equal(blocks[fits], wanted[fits])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300, deadline=None)
@given(values=arrays("f4", (3, BLOCK), elements=st.floats(allow_nan=False, allow_infinity=False, width=32)))
def test_any_finite_values(kind, values):
    assert_as_package(values, kind, encode_blocks(values, kind))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(steps=arrays("i2", (4, BLOCK), elements=st.integers(-254, 254)), scale=st.integers(-20, 10))
def test_halves_between_codes(kind, steps, scale):
    """Values that lie on codes and in the middle between them, at any scale that is a power of two."""
    values = (steps / 2).astype("f4")
    values[:, 0] = 127 if kind == "ggml:Q8_0" else -8
    values = values.clip(-127 if kind == "ggml:Q8_0" else -8, values[0, 0].__abs__()) * np.float32(2.0**scale)
    assert_as_package(values, kind, encode_blocks(values, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exponent", [-45, -40, -38, -30, -10, -4, 0, 3, 5])
def test_all_magnitudes_stay_within_the_bound(kind, exponent):
    values = (np.random.default_rng(exponent + 50).standard_normal((2000, BLOCK)) * 10.0**exponent).astype(
        "f4"
    )
    blocks = encode_blocks(values, kind)
    assert_as_package(values, kind, blocks)
    bound = BOUNDS[kind]
    largest = np.abs(values.astype("f8")).max(axis=1, keepdims=True)
    error = np.abs(values.astype("f8") - values_of(blocks, kind))
    refused = (largest > MOST_HALF) & (
        kind in ("ggml:Q4_1", "ggml:Q5_1")
    )  # as a least value in float16 is infinite
    assert (refused | (error <= bound.block * largest + bound.absolute)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_of_both_signs_and_one_value_alone(kind):
    values = np.zeros((3, BLOCK), "f4")
    values[1] = -0.0
    values[2, 5] = -3.25
    assert_as_package(values, kind, encode_blocks(values, kind))
