"""The tokenizers of folders, and one that needs transformers only for what is asked rarely. Models of GGUF files have that."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from outrider.core.files import read_settings
from outrider.models.checkpoint import check_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FILE = "tokenizer.json"
_TRIAL = "a \U0010ffff"  # the libraries see some faults of a file only when they encode


class OwnCode(ValueError):
    """A tokenizer that is code in its folder. outrider runs no code of a model."""


def of_folder(path: str) -> Any:
    """The tokenizer that transformers reads from a folder, or from a name on the hub. It asks nothing, and no code of it runs.

    Raises OwnCode, naming the file; OSError or ValueError if there is no tokenizer.
    """
    from transformers import AutoTokenizer

    check_folder(Path(path))  # transformers makes a configuration first
    check_ids(Path(path) / FILE)
    named = Path(path) / "tokenizer_config.json"
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        tokenizer(_TRIAL)
        return tokenizer
    except (OSError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # its readers check their files in their own ways; a panic of Rust is no Exception
        here = named.is_file() and "auto_map" in read_settings(named)
        if not here and "trust_remote_code" not in str(error):
            raise ValueError(f"the tokenizer of {path} cannot be read ({type(error).__name__}: {error})") from error
        raise OwnCode(
            f"{named} names code of its own (auto_map), and outrider runs no code of a model. If the repository also has a "
            "tokenizer.json, delete auto_map and tokenizer_class from the file; or give the tokenizer of another folder: "
            'LLM(model, tokenizer="FOLDER")'
        ) from error


def tokenizer_of(path: str) -> Any | None:
    """The tokenizer, or None: a model without one can still continue token ids. Raises OwnCode for one that is code."""
    try:
        tokenizer = of_folder(path)
    except OwnCode:
        raise
    except (OSError, ValueError):
        return None
    # for a folder without tokenizer files, transformers makes an empty tokenizer that encodes every text as no token
    return tokenizer if len(tokenizer) > len(tokenizer.all_special_ids) else None


def check_ids(file: Path) -> None:
    """Raise ValueError for a tokenizer.json whose numbers no vocabulary of its length has, if the file is there.

    The library keeps a place for every id below the largest one. It ends the process if there is no memory for them.
    """
    if not file.is_file() or not re.search(rb"\d{8}", raw := file.read_bytes()):
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


def complete(tokenizer: Any) -> Any:
    """The tokenizer for other libraries: a lazy one as transformers' own, any other as it is."""
    return getattr(tokenizer, "complete", tokenizer)


class Lazy:
    """Stands for the object that `make` gives, which is called when anything is asked of it. Threads may share it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._lock = make, RLock()
        self._complete: Any = None

    @property
    def complete(self) -> Any:
        if self._complete is None:
            with self._lock:
                self._complete = self._make() if self._complete is None else self._complete
        return self._complete

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.complete, name)


class LazyTokenizer(Lazy):
    """Encodes and decodes as a tokenizer of transformers, which it makes when anything else is asked.

    backend: nothing else may use it. settings: special tokens and the chat template, by the names of transformers. Threads may
    share it, and the one that was made is theirs at once: a long text keeps no other thread waiting.
    """

    def __init__(self, backend: Tokenizer, settings: Mapping[str, Any]) -> None:
        super().__init__(self._make_complete)
        self._backend, self.settings = backend, dict(settings)

    @classmethod
    def of_folder(cls, folder: Path, settings: Mapping[str, Any]) -> LazyTokenizer:
        """From the folder's tokenizer.json. Raises ValueError for a file that cannot be read."""
        check_ids(folder / FILE)
        try:
            backend = Tokenizer.from_file(str(folder / FILE))
            backend.encode(_TRIAL)
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{folder / FILE} cannot be read ({error})") from error
        return cls(backend, settings)

    def _make_complete(self) -> PreTrainedTokenizerFast:
        from transformers import PreTrainedTokenizerFast

        backend: Any = _Uncopied(self._backend)
        return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **self.settings)

    def __call__(self, text: Any, *, add_special_tokens: bool = True, **more: Any) -> Any:
        """As transformers' own. Quick for one text and no other arguments; then there are only `input_ids`."""
        if self._complete is None and not more and isinstance(text, str):
            with self._lock:
                if self._complete is None:  # the backend cannot be changed while another thread uses it
                    return {"input_ids": self._backend.encode(text, add_special_tokens=add_special_tokens).ids}
        return self.complete(text, add_special_tokens=add_special_tokens, **more)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **more: Any) -> Any:
        """As transformers' own. Quick for a list of ids and no other arguments."""
        if self._complete is None and not more and _are_ids(token_ids):
            with self._lock:
                if self._complete is None:
                    return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return self.complete.decode(token_ids, skip_special_tokens, **more)

    def convert_ids_to_tokens(self, ids: Any, **more: Any) -> Any:
        """As transformers' own. Quick for one id and no other arguments."""
        if self._complete is None and not more and isinstance(ids, int):
            with self._lock:
                if self._complete is None:
                    return self._backend.id_to_token(ids)
        return self.complete.convert_ids_to_tokens(ids, **more)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """As transformers' own."""
        with self._lock:
            decoder = self._backend.decoder
            return " ".join(tokens) if decoder is None else decoder.decode(tokens)

    def get_vocab(self) -> dict[str, int]:
        with self._lock:
            return self._backend.get_vocab(with_added_tokens=True)

    def __len__(self) -> int:
        with self._lock:
            return self._backend.get_vocab_size(with_added_tokens=True)


class _Uncopied:
    """transformers copies the tokenizer that it is given, which takes as long as making it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __deepcopy__(self, memo: Any) -> Tokenizer:
        return self.tokenizer


def _are_ids(given: Any) -> bool:
    return isinstance(given, Sequence) and (not given or isinstance(given[0], int))
