#!/usr/bin/env python3
"""Token ids from PyPI's tokenizers for 1 000 texts with two tokenizers: tests/tokenizer_cases/, a reference of
tests/tokenizer_cases.rs.

    python3 scripts/tokenizer_cases.py                  (needs tokenizers 0.22 or newer)

    twin.json    a tokenizer.json like Gemma 4's with the 512 ids of the test checkpoints: control tokens and newline runs under Gemma's ids,
                 byte fallback, merges learnt from the texts
    cases.json   texts, and the ids of each without the post-processor: with models/demo, and with twin.json
"""

import json
import random
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tiny_caller import CONTROL

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "tests/tokenizer_cases"
TEXTS = 1000

STRIKE_END, NEWLINE, BYTES, VOCABULARY = 212, 107, 238, 512

PARTS = {
    "whitespace": [" ", "  ", "   ", " " * 17, "\t", "\t\t", " \t ", "\n", "\n\n", "\n\n\n", "\n" * 7, " \n ", "\u00a0",
                   "\u2003", "\u3000", "\u200b", "\u2028", "\x0b", "\x0c", "\x85"],
    "line ends": ["\r\n", "\r", "\n\r", "\r\n\r\n", "a\r\nb", "\r\n\t"],
    "controls": ["\0", "\0\0", "\x01", "\x1b[0m", "\x7f", "\ufeff", "\ufffd", "\u0600"],
    "emoji": ["😀", "👨‍👩‍👧‍👦", "👍🏽", "🇩🇪", "🏳️‍🌈", "1️⃣", "❤️", "🧑🏿‍🚀", "☺", "🦀"],
    "control tokens": [*CONTROL.values(), "</s>", "<s>", "<start_of_turn>", "<end_of_turn>", "<|turn", "turn|>", "<|tu rn>",
                       "<<bos>>", "<bos", "<0x0A>", "<0xE2>", "[PAD300]", "<unused0>", "<|turn>user\n", "<turn|>\n"],
    "scripts": ["Straße", "naïve", "Café déjà", "Cafe\u0301", "привет", "мир", "你好", "世界", "こんにちは", "한국어", "שלום",
                "العربية", "हिन्दी", "ไทย", "Ελλάδα", "Åse", "ﬁn", "Ⅷ", "ẛ̣", "ı", "İ"],
    "byte fallback": ["\U0010ffff", "𓂀", "\ue000", "𝔘", "⠿", "꧁", "\u0301", "\u202e", "𐍈", "\U000e0067"],
    "marks": ["\u2581", "\u2581\u2581", " \u2581", "\u2581 a", "a\u2581b", "_", "__"],
    "text": ["the", " the", "The end.", "in", "er", "fn main() {", "}", "0x1F", "3.14159", "e", "a b  c", "CamelCase",
             "https://example.org/?q=1&r=2", "\"quoted\"", "'", "`x`", "//", "/// docs", "#[test]", "Vec<u32>", "—", "…"],
}  # fmt: skip


def texts():
    """Every part alone, then random sequences: of one kind, of two, of all; and repetitions."""
    rng = random.Random(21)
    kinds = list(PARTS)
    found = dict.fromkeys(part for parts in PARTS.values() for part in parts)
    while len(found) < TEXTS:
        chosen = rng.choice([[rng.choice(kinds)], rng.sample(kinds, 2), kinds])
        parts = [part for kind in chosen for part in PARTS[kind]]
        text = rng.choice(["", " "]).join(rng.choice(parts) for _ in range(rng.randrange(2, 14)))
        if rng.random() < 0.1:
            text = rng.choice(parts) * rng.randrange(2, 40)
        found[text] = None
    return list(found)[:TEXTS]


def twin(corpus):
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    own = [*CONTROL.values(), "</s>"]
    pieces = VOCABULARY - len(own) - 3 - 256
    plain = [text for text in corpus if not any(token in text for token in own)]
    trainer = trainers.BpeTrainer(vocab_size=pieces, limit_alphabet=pieces - 60, max_token_length=12, show_progress=False)
    learnt = Tokenizer(models.BPE())
    learnt.normalizer = tokenizer.normalizer
    learnt.train_from_iterator(plain, trainer)
    description = json.loads(learnt.to_str())["model"]
    vocabulary = {name: id for id, name in CONTROL.items()} | {"</s>": STRIKE_END}
    vocabulary |= {"\n" * (run + 1): NEWLINE + run for run in range(3)}
    vocabulary |= {f"<0x{byte:02X}>": BYTES + byte for byte in range(256) if BYTES + byte < VOCABULARY}
    free = iter(sorted(set(range(VOCABULARY)) - set(vocabulary.values())))
    merges = [pair for pair in description["merges"] if "\n" not in "".join(pair)]
    for token in sorted(description["vocab"], key=description["vocab"].get):
        if token not in vocabulary and "\n" not in token:
            vocabulary[token] = next(free)
    vocabulary |= {f"[PAD{id}]": id for id in free}
    merges = [pair for pair in merges if all(part in vocabulary for part in [*pair, "".join(pair)])]
    merges = [("\n", "\n"), ("\n\n", "\n"), *map(tuple, merges)]
    tokenizer.model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in CONTROL.values()])
    tokenizer.add_tokens([AddedToken("</s>", normalized=False)])
    return tokenizer


def main():
    corpus = texts()
    OUT.mkdir(exist_ok=True)
    made = twin(corpus)
    assert made.get_vocab_size() == VOCABULARY, made.get_vocab_size()
    (OUT / "twin.json").write_text(made.to_str())
    both = {"demo": Tokenizer.from_file(str(ROOT / "models/demo/target/tokenizer.json")), "twin": made}
    cases = {"tokenizers": tokenizers.__version__, "texts": corpus}
    for name, tokenizer in both.items():
        cases[name] = [tokenizer.encode(text, add_special_tokens=False).ids for text in corpus]
        used = {id for ids in cases[name] for id in ids}
        print(f"{name}: {sum(map(len, cases[name]))} ids, {len(used)} different ones")
    (OUT / "cases.json").write_text(json.dumps(cases, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
