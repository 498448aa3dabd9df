"""Loading subjects: what works, what is refused and in which words."""

from __future__ import annotations

import importlib.resources
import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from evaluators import subjects
from evaluators.errors import SubjectError
from evaluators.subjects import Subject, load_subject, subject_from_model
from tests.tiny_models import KINDS, Kind, make_tiny_model, make_tiny_subject, make_tiny_tokenizer, make_tiny_tokens


def save_tiny(folder: Path, kind: Kind = "llama", *, dtype: torch.dtype = torch.bfloat16, **changes: object) -> Path:
    make_tiny_model(kind, **changes).to(dtype).save_pretrained(folder)  # type: ignore[arg-type, operator]
    return folder


def logits(subject: Subject, tokens: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = subject.model(tokens).logits
    return result


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_folder_loads_as_the_model_it_was(
    kind: Kind, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny(tmp_path / "model", kind, tied=kind in ("qwen3", "gemma3"))
    capfd.readouterr()
    subject = load_subject(folder)
    assert capfd.readouterr() == ("", "")
    assert subject.name == "model"
    assert subject.dtype_on_disk == "bfloat16"
    assert subject.folder == folder
    assert subject.tokenizer is None
    assert subject.bos_token_id == 1
    assert not subject.model.training
    parameters = list(subject.model.parameters())
    assert all(parameter.dtype == torch.float32 and not parameter.requires_grad for parameter in parameters)
    expected = make_tiny_model(kind, tied=kind in ("qwen3", "gemma3"))
    for parameter in expected.parameters():  # not `.bfloat16()`, which would round the rotary frequencies too
        parameter.copy_(parameter.bfloat16())
    tokens = make_tiny_tokens(2, 40)
    assert torch.equal(logits(subject, tokens), expected(tokens, use_cache=False).logits)
    assert subject.model(tokens).past_key_values is None
    assert subject.config_summary["architecture"] == type(expected).__name__
    assert subject.config_summary["parameters"] == sum(p.numel() for p in expected.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_logits_do_not_depend_on_the_batch(kind: Kind) -> None:
    subject = make_tiny_subject(kind)
    tokens = make_tiny_tokens(5, 48)
    together = logits(subject, tokens)
    assert torch.equal(together, logits(subject, tokens))
    for i in range(5):
        torch.testing.assert_close(logits(subject, tokens[i : i + 1])[0], together[i], rtol=1e-5, atol=1e-5)


def test_hash_names_the_content_and_not_the_container(tmp_path: Path) -> None:
    first = load_subject(save_tiny(tmp_path / "a"))
    make_tiny_model("llama").bfloat16().save_pretrained(tmp_path / "b", max_shard_size="50KB")  # type: ignore[operator]
    sharded = load_subject(tmp_path / "b")
    assert (tmp_path / "b" / "model.safetensors.index.json").is_file()
    assert first.hash == sharded.hash
    assert len(first.hash) == 64
    assert load_subject(save_tiny(tmp_path / "c", seed=1)).hash != first.hash
    edit_config(tmp_path / "a", transformers_version="0.0.1")
    assert load_subject(tmp_path / "a").hash == first.hash
    edit_config(tmp_path / "a", rms_norm_eps=1e-3)
    assert load_subject(tmp_path / "a").hash != first.hash
    bits = load_file(tmp_path / "c" / "model.safetensors")
    bits["model.norm.weight"][0] *= 2
    save_file(bits, tmp_path / "c" / "model.safetensors", metadata={"format": "pt"})
    assert load_subject(tmp_path / "c").hash != load_subject(save_tiny(tmp_path / "d", seed=1)).hash


@pytest.mark.parametrize("tied", [False, True])
def test_a_pristine_copy_is_independent(tied: bool) -> None:
    subject = make_tiny_subject("qwen3", tied=tied)
    tokens = make_tiny_tokens(1, 12)
    before = logits(subject, tokens)
    copy = subject.pristine()
    assert copy.hash == subject.hash
    assert copy.map.is_tied == tied
    assert torch.equal(logits(copy, tokens), before)
    for parameter in copy.model.parameters():
        parameter.zero_()
    copy.map.replace("blocks.0.q", torch.nn.Identity())
    assert torch.equal(logits(subject, tokens), before)


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_is_the_model_cut_after_its_first_blocks(kind: Kind) -> None:
    subject = make_tiny_subject(kind, blocks=3)
    tokens = make_tiny_tokens(1, 30)
    captured: list[torch.Tensor] = []
    hook = subject.map.block_modules[1].register_forward_hook(lambda _m, _a, output: captured.append(output))
    full = logits(subject, tokens)
    hook.remove()
    short = subject.truncated(2)
    expected = subject.map.head(subject.map.final_norm.module(captured[0]))
    assert torch.equal(logits(short, tokens), expected)
    assert short.map.num_blocks == 2
    assert short.hash != subject.hash
    assert short.model.config.num_hidden_layers == 2  # type: ignore[union-attr]
    assert all(module.config is short.model.config for module in short.model.modules() if hasattr(module, "config"))
    for parameter in short.model.parameters():
        parameter.zero_()
    assert torch.equal(logits(subject, tokens), full)
    for wrong in (0, 4):
        with pytest.raises(SubjectError, match=f"cannot keep {wrong} of 3 blocks"):
            subject.truncated(wrong)


def test_the_tokenizer_is_read_when_asked_for_and_shared_by_copies(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m")
    make_tiny_tokenizer().save_pretrained(folder)
    subject = load_subject(folder)
    copy = subject.pristine()
    assert copy.tokenizer is subject.tokenizer
    assert subject.tokenizer is not None
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(SubjectError, match=r"the tokenizer in .* cannot be read"):
        _ = load_subject(folder).tokenizer


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("no/such/folder", r"no subject 'no/such/folder'; give one of nano-llama, nano-qwen3, an existing"),
        ("", "no subject ''|has no config.json"),
        ("../nowhere", "no subject"),
        ("nowhere.gguf", "no file nowhere.gguf"),
    ],
)
def test_a_reference_that_leads_nowhere_says_what_works(
    reference: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SubjectError, match=message):
        load_subject(reference)


def test_a_hub_id_is_tried_only_when_no_such_folder_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[str] = []

    def refuse(hub_id: str, **_: object) -> str:
        asked.append(hub_id)
        raise OSError("We couldn't connect to the hub\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SubjectError, match=r"no folder 'some-org/some-model' here, and the hub .*connect.*network"):
        load_subject("some-org/some-model")
    assert asked == ["some-org/some-model"]
    save_tiny(tmp_path / "some-org" / "some-model")
    assert load_subject("some-org/some-model").name == "some-model"
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *_a, **_k: str(tmp_path / "some-org" / "some-model")
    )
    assert load_subject("other-org/some-model").name == "other-org/some-model"
    assert len(asked) == 1


def test_missing_parts_of_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(SubjectError, match="has no config.json"):
        load_subject(tmp_path)
    folder = save_tiny(tmp_path / "m")
    with pytest.raises(SubjectError, match="is a file; give the folder"):
        load_subject(folder / "config.json")
    (folder / "model.safetensors").unlink()
    with pytest.raises(SubjectError, match=r"has no model.safetensors .*none"):
        load_subject(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(SubjectError, match="only pickled ones"):
        load_subject(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    make_tiny_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")  # type: ignore[operator]
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    shards[1].unlink()
    with pytest.raises(SubjectError, match=rf"lacks 1 of {len(shards)} weight files, first \['{shards[1].name}'\]"):
        load_subject(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(SubjectError, match="is not an index of weight files"):
        load_subject(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 8, 60, 0.5, -1])
def test_a_truncated_weight_file_is_one_clear_sentence(keep: float, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(
        SubjectError, match=r"(is truncated|is not a safetensors file).*; copy or download it"
    ) as caught:
        load_subject(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "header",
    [b"not json", b"[]", b"{}", b'{"a": 3}', b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}'],
)
def test_a_damaged_header_is_one_clear_sentence(header: bytes, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    with pytest.raises(
        SubjectError, match=r"(not a safetensors file|damaged|holds no tensors).*; copy or download it again"
    ):
        load_subject(folder)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(96, 64, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        SubjectError, match=r"stores 'model.layers.0.mlp.up_proj.weight' as U8; give a full-precision model"
    ):
        load_subject(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, r"model_type 'gpt2', which cannot be mapped; known: gemma3_text, llama"),
        ({"model_type": "gemma3"}, "only the text models"),
        ({"model_type": None}, "model_type None"),
        ({"quantization_config": {"quant_method": "gptq"}}, "already quantized"),
        ({"num_hidden_layers": 3}, r"lacks weights that the architecture needs: 16"),
        ({"num_hidden_layers": 1}, r"holds weights that the architecture does not use: 16"),
        ({"intermediate_size": 128}, "cannot be loaded|another shape"),
        ({"num_attention_heads": "many"}, "cannot be loaded"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    changes: dict[str, object], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny(tmp_path / "m")
    edit_config(folder, **changes)
    capfd.readouterr()
    with pytest.raises(SubjectError, match=message) as caught:
        load_subject(folder)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_config_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m")
    (folder / "config.json").write_text(text)
    with pytest.raises(SubjectError, match=r"config.json (is not JSON|holds no JSON object)"):
        load_subject(folder)


def test_a_missing_weight_is_not_invented(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.v_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SubjectError, match=r"lacks weights .*: 1, first \['model.layers.1.self_attn.v_proj.weight'\]"):
        load_subject(folder)


def test_rotary_frequencies_that_old_files_store_are_no_reason_to_refuse(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m")
    expected = load_subject(folder).hash
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert load_subject(folder).hash == expected


def test_a_non_finite_weight_names_the_layer(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.gate_proj.weight"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SubjectError, match=r"layer 'blocks.1.gate' \(weight\) holds 1 non-finite"):
        load_subject(folder)


def test_an_input_that_32_does_not_divide_names_the_layer(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m", intermediate_size=72)
    with pytest.raises(SubjectError, match=r"'blocks.0.down' has 72 inputs"):
        load_subject(folder)


def test_a_file_that_only_calls_itself_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGML" + bytes(100))
    with pytest.raises(SubjectError, match=r"does not begin with the GGUF mark \(found b'GGML'\)"):
        load_subject(path)
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(SubjectError, match="cannot be read as a GGUF model"):
        load_subject(path)


@pytest.mark.slow  # needs the packages of the `gguf` extra
def test_a_gguf_file_gives_the_model_it_was_written_from(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf extra is not installed")
    pytest.importorskip("accelerate", reason="the gguf extra is not installed")
    model = make_tiny_model("llama", attention_bias=False, mlp_bias=False)
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_rope_dimension_count(32)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(128)
    writer.add_bos_token_id(1)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "model.layers": "blk",
    }  # fmt: skip
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        for heads, projection in ((4, "q_proj"), (2, "k_proj")):
            if projection in name:  # GGUF interleaves the two halves that RoPE rotates into each other
                values = values.reshape(heads, 2, 16, 64).swapaxes(1, 2).reshape(values.shape)
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, values.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    capfd.readouterr()
    subject = load_subject(path)
    assert capfd.readouterr() == ("", "")
    assert (subject.name, subject.dtype_on_disk, subject.map.is_tied) == ("tiny", "gguf", False)
    assert not hasattr(subject.model.config, "quantization_config")
    tokens = make_tiny_tokens(2, 20)
    torch.testing.assert_close(logits(subject, tokens), model(tokens, use_cache=False).logits, rtol=1e-4, atol=1e-4)
    assert subject.pristine().truncated(1).map.num_blocks == 1


def test_an_unmappable_model_in_memory_is_refused() -> None:
    with pytest.raises(SubjectError, match="cannot be mapped"):
        subject_from_model(_NoDecoder(), name="x")


class _NoDecoder(torch.nn.Module):
    config = type("Config", (), {"use_cache": True})()


@pytest.mark.parametrize("name", subjects.SHIPPED)
def test_a_shipped_subject_that_is_not_installed_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.resources, "files", lambda _package: tmp_path)
    with pytest.raises(SubjectError, match=f"the shipped subject {name!r} is not installed"):
        load_subject(name)
