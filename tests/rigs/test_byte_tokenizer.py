"""The plain functions agree with the tokenizer library on the same tokenizer.json."""

import random

from tokenizers import Tokenizer

from tests.rigs import byte_tokenizer
from tests.rigs.executor import Shape


def test_plain_decode_equals_the_library_on_random_tokens() -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer.tokenizer_json().decode())
    rng = random.Random(1)
    for length in (0, 1, 2, 3, 10, 400):
        for _ in range(50):
            tokens = [rng.randrange(byte_tokenizer.VOCAB_SIZE) for _ in range(length)]
            assert tokenizer.decode(tokens) == byte_tokenizer.decode(tokens)


def test_text_is_encoded_to_its_bytes_and_special_tokens_are_decoded_to_no_text() -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer.tokenizer_json().decode())
    text = "the STOP é日本😀\n\0 ab"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.encode("<eos>").ids == [byte_tokenizer.EOS_ID]
    assert tokenizer.get_vocab_size() == byte_tokenizer.VOCAB_SIZE
    assert tokenizer.decode([byte_tokenizer.EOS_ID], skip_special_tokens=False) == "<eos>"


def test_the_default_shape_samples_from_this_vocabulary() -> None:
    shape = Shape()
    assert shape.vocab_size == byte_tokenizer.VOCAB_SIZE
    assert shape.sampled_vocab == byte_tokenizer.NUM_DRAWN
    assert shape.eos_token_ids == (byte_tokenizer.EOS_ID,)
    assert byte_tokenizer.NUM_DRAWN <= byte_tokenizer.POISON_ID < byte_tokenizer.VOCAB_SIZE
