"""Strings that tokenizers disagree on, made from a seed."""
# ruff: noqa: RUF001 - look-alikes are what this file is about

from __future__ import annotations

import random

_LETTERS = (
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "àéîõüñçßœæøåłžșğİıſΩЖщъїґѢΣςλαβγπ",
    "漢字仮名交じり文ひらがなカタカナ中文简体繁體한국어조합ㄱㅏ𠮷𪚥",
    "العربيةהעבריתفارسیاردوދިވެހި",
    "हिन्दीবাংলাதமிழ்తెలుగుಕನ್ನಡമലയാളംไทยภาษาລາວខ្មែរမြန်မာ",
    "ႠႡაბգԱԲաբ᚛᚛ᚁ𐌰𐌱𐐀𐐨ᏣᎳᎩ𝔸𝔹𝕔𝓍ﬁﬂǅ",
)
_SPACES = " \t\n\r\v\f\u0085\u00a0\u1680\u2000\u2002\u2003\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
_INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff\u00ad\u180e\u200e\u200f\u202a\u202e\u2066\u2069"
_COMBINING = (
    "\u0300\u0301\u0308\u030a\u0323\u0327\u0489\u20dd\u064b\u0651\u093c\u094d\u0e31\u3099\ufe0e\ufe0f"
)
_CONTROLS = "".join(map(chr, [*range(0x01, 0x20), 0x7F, *range(0x80, 0xA0)]))
_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~¡¿«»“”‘’„…–—·•†‡§¶©®™°±×÷€£¥₿←→∀∂∈∑√∞≈≠≤≥┌─┐│█▁▂"
_DIGITS = "0123456789²³¹½¼¾٠١٢٣٤٥०१२३৪೫๑๒〇一二三ⅠⅡⅫ①②⓪𝟎𝟏𝟗"
_EMOJI = [
    *"😀😂🥲🤖🔥💯✨🎉🚀☕⚡❤✅❌⭐",
    *("👍🏽", "👩‍💻", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇯🇵", "1️⃣", "#️⃣", "❤️‍🔥", "🧑🏿‍🚀", "🫠"),
    "🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",
]
_CONTRACTIONS = (
    *("I'm", "don't", "we'll", "they've", "you're", "he'd", "it's", "IT'S", "WE'LL", "O'Neil", "'tis"),
    *("rock'n'roll", "’s", "l’été", "'S", "'x", "''s'", "'ſ", "'Re", "'lL"),
)
_WORDS = (
    *("the", "of", "and", "to", "in", "model", "token", "attention", "Transformer", "inference"),
    *("getUserById", "snake_case", "CamelCaseWord", "HTTPServer", "antidisestablishmentarianism"),
    *("https://example.org/a?b=c&d=%20e", "user@example.com", "2024-01-31T12:00:00Z", "v1.2.3-rc4"),
    *("3.14159", "1,000,000", "1e-5", "0xDEADBEEF", "Straße", "naïve", "façade", "Ὀδυσσεύς"),
    *("Привет", "мир", "שלום", "مرحبا", "你好", "世界", "こんにちは", "안녕하세요"),
)
_CODE = (
    "def f(x: int) -> int:\n    return x ** 2  # square\n",
    "for (int i = 0; i < n; ++i) {\n\t\tsum += a[i];\n\t}\r\n",
    '{"role": "user", "content": "hi\\n", "n": [1, 2.5, null]}',
    "SELECT * FROM t WHERE a<>'b' AND c>=10;--x",
    "<table>\n  <tr><td>1</td></tr>\n</table>",
    "$ grep -rn 'foo\\|bar' ./src | head -n 5 && echo \"$?\"",
    "| a | b |\n|---|:-:|\n| `x` | **y** |\n\n```py\nprint()\n```\n",
    r"\frac{\partial f}{\partial x} \leq \sum_{i=0}^{n} x_i^2",
)
SPECIAL_TEXTS = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|eot_id|>", "<bos>", "<eos>"),
    *("<pad>", "<start_of_turn>", "<end_of_turn>", "<unused42>", "<s>", "</s>", "<unk>", "<0x0A>", "<0xE2>"),
    *("<|im_", "im_end|>", "<repo_name>", "[INST]", "<|reserved_special_token_1|>", "<tool_call>"),
    *("</tool_call>", "<mask>", "▁the", "▁▁"),
)


def varied_strings(count: int, seed: int) -> list[str]:
    """``count`` strings, the same for a seed every time: texts, code, scripts, emoji, white space, noise."""
    rng = random.Random(seed)

    def run(alphabet: str, longest: int) -> str:
        return "".join(rng.choices(alphabet, k=rng.randint(1, longest)))

    def any_character() -> str:
        while True:
            code = rng.randrange(1, rng.choice((0x500, 0x3000, 0x20000)))
            if not 0xD800 <= code < 0xE000:
                return chr(code)

    makers = (
        lambda: rng.choice(_WORDS),
        lambda: " " + rng.choice(_WORDS),
        lambda: " ".join(rng.choices(_WORDS, k=rng.randint(2, 12))) + rng.choice(".,!?;:\n "),
        lambda: rng.choice(_CONTRACTIONS),
        lambda: run(rng.choice(_LETTERS), 12),
        lambda: run(_SPACES, 6),
        lambda: rng.choice(" \n\t\r") * rng.randint(1, 40),
        lambda: run(_DIGITS, 9),
        lambda: run("0123456789", 14),
        lambda: run(_PUNCTUATION, 6),
        lambda: rng.choice(_PUNCTUATION) * rng.randint(2, 90),
        lambda: rng.choice((*"aehlmo.-=*哈w", "ha", "na", "ab", "lo", "xo")) * rng.randint(2, 25),
        lambda: "".join(rng.choices(_EMOJI, k=rng.randint(1, 4))),
        lambda: rng.choice(_LETTERS[0]) + run(_COMBINING, 3),
        lambda: run(_INVISIBLE, 3),
        lambda: run(_CONTROLS, 4),
        lambda: rng.choice(_CODE),
        lambda: rng.choice(SPECIAL_TEXTS),
        lambda: "".join(any_character() for _ in range(rng.randint(1, 8))),
    )
    return ["".join(rng.choice(makers)() for _ in range(rng.randint(1, 8))) for _ in range(count)]
