"""A small tokenizer of transformers with a chat template, for tiny models: one token a letter."""

from __future__ import annotations

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BOS, EOS, START, END = 50, 51, 52, 53  # numbers of <s>, </s>, <|im_start|> and <|im_end|>


def save_tokenizer(folder, template=CHATML, *, eos="</s>", extra=("<|im_start|>", "<|im_end|>")):
    """Save a tokenizer as transformers does; without a template, for a base model."""
    import tokenizers
    import transformers

    letters = [*map(chr, range(ord("a"), ord("z") + 1)), *"WFC?.,:", *map(chr, range(ord("0"), ord("9") + 1))]
    letters += ["Ġ", "Ċ", "<unk>", *"!-_+"]
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={one: at for at, one in enumerate(letters)}, merges=[], unk_token="<unk>")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>", *extra])
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token=eos, unk_token="<unk>", chat_template=template
    )
    made.save_pretrained(folder)
    return folder
