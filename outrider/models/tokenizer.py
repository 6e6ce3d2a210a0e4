"""The tokenizers of folders. transformers reads those that are no tokenizer.json, and nothing else needs it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, models

from outrider.core.extras import MissingExtra, needs
from outrider.core.files import read_settings
from outrider.models.checkpoint import check_folder

FILE, SETTINGS = "tokenizer.json", "tokenizer_config.json"
_TRIAL = "a \U0010ffff"  # the libraries see some faults of a file only when they encode
_OTHERS = (SETTINGS, "vocab.json", "vocab.txt", "tekken.json", "*.model")  # of which transformers makes tokenizers
_STANDARD = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# spaces that BERT's decoder puts before them
_SPACED = (
    {f" {x}": x for x in (".", "?", "!", ",")} | {" ' ": "'"} | {f" {x}": x for x in ("n't", "'m", "'s", "'ve", "'re")}
)


class OwnCode(ValueError):
    """A tokenizer that is code in its folder. outrider runs no code of a model."""


class FastTokenizer:
    """Encodes and decodes as transformers' own tokenizer of the same files, and has its names. Threads may share it.

    Attributes:
        special_tokens_map: The texts of the special tokens by what they are, such as `eos_token`.
        all_special_tokens: These, and others that texts are shown without.
        chat_template: A template, or templates by their names. None if there is none.
    """

    is_fast = True

    def __init__(
        self,
        backend: Tokenizer,
        special: Mapping[str, str | None],
        chat_template: Any = None,
        extra: Sequence[str] = (),
        clean: bool = False,
    ) -> None:
        """backend: nothing else may change it. special: as `special_tokens_map`. extra: the others. clean: decoded text has no
        space before a full stop."""
        backend.no_truncation()
        backend.no_padding()
        self.backend_tokenizer, self.chat_template, self._clean = backend, chat_template, clean
        found = {name: special.get(name) for name in dict.fromkeys((*_STANDARD, *special))}
        self.special_tokens_map = {name: text for name, text in found.items() if text is not None}
        self.all_special_tokens = [*dict.fromkeys((*self.special_tokens_map.values(), *extra))]
        self.bos_token, self.eos_token, self.unk_token, _, self.pad_token, *_ = found.values()
        self.bos_token_id, self.eos_token_id, self.unk_token_id, self.pad_token_id = (
            None if text is None else backend.token_to_id(text)
            for text in (self.bos_token, self.eos_token, self.unk_token, self.pad_token)
        )

    @classmethod
    def of_folder(cls, folder: Path) -> FastTokenizer:
        """From the folder's tokenizer.json and what stands beside it. Raises ValueError for files that cannot be read."""
        check_ids(folder / FILE)
        try:
            backend = Tokenizer.from_file(str(folder / FILE))
            backend.encode(_TRIAL)
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{folder / FILE} cannot be read ({error})") from error
        try:
            return cls._with(backend, _settings(folder), _templates(folder))
        except Exception as error:
            raise ValueError(f"the settings of the tokenizer of {folder} cannot be read ({error!r})") from error

    @classmethod
    def _with(cls, backend: Tokenizer, settings: dict[str, Any], templates: dict[str, str]) -> FastTokenizer:
        names = [*dict.fromkeys((*_STANDARD, *(name for name in settings if name.endswith("_token"))))]
        named = {name: _text(settings[name]) for name in names if isinstance(settings.get(name), (str, dict))}
        extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
        if isinstance(extra, dict):
            named, extra = named | {name: _text(x) for name, x in extra.items()}, []
        extra = [_text(x) for x in extra]
        given = sorted((settings.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
        added = [AddedToken(**{k: v for k, v in token.items() if k != "__type"}) for _, token in given]
        there = {token.content: token for token in backend.get_added_tokens_decoder().values()}
        added = [token for token in added if repr(token) != repr(there.get(token.content))]
        there |= {token.content: token for token in added}
        more = dict.fromkeys(text for text in (*named.values(), *extra) if text not in there)
        backend.add_tokens(added + [AddedToken(text, special=True) for text in more])
        backend.encode_special_tokens = bool(settings.get("split_special_tokens"))
        clean = bool(settings.get("clean_up_tokenization_spaces"))
        forced = settings.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output")
        template = templates or settings.get("chat_template")
        if isinstance(template, list):
            template = {one["name"]: one["template"] for one in template}
        elif template is not None and not isinstance(template, (str, dict)):
            raise ValueError(f"chat_template is {template!r:.80}")
        if isinstance(template, dict) and [*template] == ["default"]:
            template = template["default"]
        return cls(backend, named, template, extra, clean and bool(forced or not isinstance(backend.model, models.BPE)))

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        return_offsets_mapping: bool = False,
        verbose: bool = False,
    ) -> dict[str, Any]:
        """The `input_ids` of a text, or of each of several; on request the `offset_mapping`: the characters that each token
        stands for. verbose: changes nothing; transformers' own warns of long texts."""
        one = isinstance(text, str)
        found = self.backend_tokenizer.encode_batch([text] if one else [*text], add_special_tokens=add_special_tokens)
        parts: dict[str, list[Any]] = {"input_ids": [e.ids for e in found]}
        if return_offsets_mapping:
            parts["offset_mapping"] = [e.offsets for e in found]
        return {name: part[0] if one else part for name, part in parts.items()}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text."""
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(
        self, token_ids: Any, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool | None = None
    ) -> Any:
        """The text of a token, of a list or an array of them; the texts of a list of lists."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        ids = [*ids] if isinstance(ids, Sequence) else [ids]
        if ids and (isinstance(ids[0], Sequence) or getattr(ids[0], "ndim", 0)):
            return [self.decode(one, skip_special_tokens, clean_up_tokenization_spaces) for one in ids]
        text = self.backend_tokenizer.decode([*map(int, ids)], skip_special_tokens=skip_special_tokens)
        for spaced, plain in _SPACED.items() if self._clean and clean_up_tokenization_spaces is not False else ():
            text = text.replace(spaced, plain)
        return text

    batch_decode = decode

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """The name of a token in the vocabulary, or those of several. None for an id that it has not."""
        return (
            self.backend_tokenizer.id_to_token(ids) if isinstance(ids, int) else [*map(self.convert_ids_to_tokens, ids)]
        )

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a token by its name, or those of several. That of `unk_token` for one that the vocabulary has not."""
        if not isinstance(tokens, str):
            return [*map(self.convert_tokens_to_ids, tokens)]
        found = self.backend_tokenizer.token_to_id(tokens)
        return self.unk_token_id if found is None else found

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text of tokens by their names."""
        decoder = self.backend_tokenizer.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **variables: Any,
    ) -> Any:
        """The prompt of a chat as its template has it: a text, its ids, or {"input_ids": ids}. `LLM.encode` does more for it."""
        from outrider.models.chat_template import render, source_of

        source = chat_template or source_of(self, bool(tools), "documents" in variables)
        variables = self.special_tokens_map | {"add_generation_prompt": add_generation_prompt} | variables
        text = render(source, conversation, tools, variables)
        if not tokenize:
            return text
        ids = self.encode(text, add_special_tokens=False)
        return {"input_ids": ids} if return_dict else ids

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the files that `of_folder` reads, and transformers too."""
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | self.special_tokens_map
        more = [text for text in self.all_special_tokens if text not in self.special_tokens_map.values()]
        settings |= {"additional_special_tokens": more} if more else {}
        settings |= {"clean_up_tokenization_spaces": True} if self._clean else {}
        template = self.chat_template
        if isinstance(template, Mapping):
            template = [{"name": name, "template": text} for name, text in template.items()]
        settings |= {"chat_template": template} if template else {}
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.backend_tokenizer.save(str(Path(folder, FILE)), pretty=False)
        Path(folder, SETTINGS).write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")

    @property
    def all_special_ids(self) -> list[int]:
        return self.convert_tokens_to_ids(self.all_special_tokens)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The tokens that are found in a text before it is cut, by id."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    def get_vocab(self) -> dict[str, int]:
        """All tokens and their ids."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)


def _settings(folder: Path) -> dict[str, Any]:
    """What the files beside a tokenizer.json say. Special tokens had a file of their own, before they were listed."""
    settings, older = (
        {} if not f.is_file() else read_settings(f) for f in (folder / SETTINGS, folder / "special_tokens_map.json")
    )
    return settings if "added_tokens_decoder" in settings else settings | older


def _templates(folder: Path) -> dict[str, str]:
    """The chat templates that are files, by their names."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {f.stem: f for f in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    return {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}


def _text(token: Any) -> str:
    text = token["content"] if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ValueError(f"{token!r:.80} is no token")
    return text


def of_folder(path: str) -> Any:
    """The tokenizer of a folder, or of a name on the hub. transformers reads it if it is no tokenizer.json. No code of it runs.

    Raises MissingExtra if transformers is not installed, and needed; OwnCode, naming the file; OSError or ValueError if there is
    no tokenizer.
    """
    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        small = ["*.json", "*.jinja", "*.txt", "*.model"]
        folder = Path(snapshot_download(path, allow_patterns=small, ignore_patterns=["*.index.json"]))
    if (folder / FILE).is_file():
        return FastTokenizer.of_folder(folder)
    if not any(next(folder.glob(name), None) for name in _OTHERS):
        raise FileNotFoundError(f"{folder} has no tokenizer")
    with needs("torch", f"the tokenizer of {folder}, which has no {FILE},"):
        from transformers import AutoTokenizer
    check_folder(folder)  # transformers makes a configuration first
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        tokenizer(_TRIAL)
        return tokenizer
    except (OSError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # its readers check their files in their own ways; a panic of Rust is no Exception
        named = folder / SETTINGS
        here = named.is_file() and "auto_map" in read_settings(named)
        if not here and "trust_remote_code" not in str(error):
            raise ValueError(f"the tokenizer of {folder} cannot be read ({type(error).__name__}: {error})") from error
        raise OwnCode(
            f"{named} names code of its own (auto_map), and outrider runs no code of a model. Give the tokenizer of another "
            'folder: LLM(model, tokenizer="FOLDER")'
        ) from error


def tokenizer_of(path: str) -> Any | None:
    """The tokenizer, or None: a model without one can still continue token ids. Raises OwnCode and MissingExtra."""
    try:
        tokenizer = of_folder(path)
    except (OwnCode, MissingExtra):
        raise
    except (OSError, ValueError):
        return None
    # for a folder without tokenizer files, transformers makes an empty tokenizer that encodes every text as no token
    return tokenizer if len(tokenizer) > len(tokenizer.all_special_ids) else None


def check_ids(file: Path) -> None:
    """Raise ValueError for a tokenizer.json whose numbers no vocabulary of its length has, if the file is there.

    The library keeps a place for every id below the largest one. It ends the process if there is no memory for them.
    """
    if not file.is_file():
        return
    raw = file.read_bytes()
    digits = np.frombuffer(raw, np.uint8) - ord("0") < 10  # below "0" it wraps around
    for hop in (1, 2, 4):
        digits = digits[:-hop] & digits[hop:]
    if not digits.any():  # no number of eight digits: the usual case, for which json takes a second
        return
    try:
        places = [v for k, v in json.loads(raw).items() if k != "truncation"]
        while places:
            value = places.pop()
            if isinstance(value, (dict, list)):
                places.extend(value.values() if isinstance(value, dict) else value)
            elif isinstance(value, int) and value > max(len(raw), 10**7):
                raise ValueError(f"it has the number {value}, and {len(raw)} bytes")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is no vocabulary: {error}; download it again") from error
