"""The pages: every Python snippet runs, every link leads somewhere, and the prose is Simplified Technical English.

What errors and hints advise is checked with them: each command line in a string of the source parses.
"""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import shlex
import webbrowser
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import typer
from prose import LONGEST_SENTENCE, banned, sentences
from typer.testing import CliRunner

from outrider.cli.main import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ROOT_PAGES = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "certify/README.md")
]
PAGES = [*ROOT_PAGES, *sorted((ROOT / "recipes").rglob("README.md")), *sorted(DOCS.rglob("*.md"))]
# The log keeps its old entries as they were written. The reference pages quote docstrings.
PROSE = [page for page in PAGES if page.name != "log.md" and page.parent.name != "reference"]

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
MEAN_SENTENCE = 16  # words


# Command lines of the pages that are parsed and not run, by a pattern, and why.
NOT_RUN = {
    r"\./|\bMODEL\b|\bHEAD\b|\bNAME\b|gguf|my-|mine\.json|folder/|requests\.jsonl|speculative_config\.json|texts\.jsonl": "files "
    "of the reader",
    r"^(serve|deploy|batch)\b": "a server; tests/system/test_serve_cli.py runs it",
    r"^run\b": "a conversation, see test_conversations_of_the_pages_are_had",
    r"^(bench|tune|certify|train|demo|export|layers|models pack|doctor \w)\b": "a minute of measurement, or its result",
    r"http://|Qwen/": "another machine",
    r"bigram": "the drafter of its page is not installed",
    r"^(models )?(pull|rm)\b": "changes the cache of the user",
    r"^doctor\b": "its exit status depends on the machine",
}


# Models of a conversation on a page -> one that is here.
STAND_INS = {
    r"small\.gguf|\./my-small-model": "builtin:code-draft",
    r"builtin:smollm2-135m|(?<=run )(?!builtin)\S+": "builtin:code",
}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(markdown: str) -> list[str]:
    """The paragraphs and list items of a page, without code, tables, headings and link targets. Inline code is one word."""
    text = FENCE.sub("\n", re.sub(r"<!-- table:.*?<!-- /table -->", "", markdown, flags=re.S))
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = "\n".join(line for line in text.splitlines() if not re.match(r"\s*(\||#|    )", line))
    text = re.sub(r"`[^`]*`", "CODE", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    blocks = re.split(r"\n\s*\n|\n\s*(?:[*-]|\d+\.)\s+", "\n" + text)
    return [" ".join(block.split()) for block in blocks if block.strip()]


def page_sentences(markdown: str) -> Iterator[tuple[int, str]]:
    """(words, sentence) of a page."""
    for block in prose(markdown):
        yield from sentences(block)


def slug(heading: str) -> str:
    """The anchor that a code host gives a heading."""
    words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip()).lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_snippets_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snippets of one page share their names, in order."""
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {"__name__": page.stem}
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)):
        exec(compile(code, f"{page.name}[{number}]", "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", FENCE.sub("", page.read_text())):
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), f"{name(page)} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", FENCE.sub("", found.read_text()), re.M)
            assert anchor in map(slug, headings), f"{name(page)} links to {target}#{anchor}"


@pytest.mark.parametrize("page", PROSE, ids=name)
def test_sentences_are_short(page: Path) -> None:
    found = list(page_sentences(page.read_text()))
    long = [sentence for words, sentence in found if words > LONGEST_SENTENCE]
    assert not long, f"{name(page)}: more than {LONGEST_SENTENCE} words:\n" + "\n".join(long)
    mean = sum(words for words, _ in found) / max(len(found), 1)
    assert mean <= MEAN_SENTENCE, f"{name(page)}: {mean:.1f} words a sentence on average"


@pytest.mark.parametrize("page", PROSE, ids=name)
def test_words_are_those_of_the_field(page: Path) -> None:
    wrong = banned("\n".join(prose(page.read_text())))
    assert not wrong, f"{name(page)}: write instead: {wrong}"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_is_written_like_the_pages(command: str) -> None:
    for text in [COMMANDS[command].help or "", *(getattr(p, "help", "") or "" for p in COMMANDS[command].params)]:
        assert not banned(text), f"outrider {command} --help: {text!r}: write instead: {banned(text)}"
        long = [sentence for words, sentence in page_sentences(text) if words > LONGEST_SENTENCE]
        assert not long, f"outrider {command} --help: more than {LONGEST_SENTENCE} words: {long}"


def command_lines(text: str) -> Iterator[list[str]]:
    """The words after `outrider` of each command in a shell text, with pipes and `&&` between commands."""
    for line in text.replace("\\\n", " ").splitlines():
        if not re.match(r"\s*(\$ )?([A-Z_]+=\S+ )*outrider \S|.*[|&] outrider ", line):
            continue
        words = shlex.split(line, comments=True)
        for part in " ".join("\n" if w in ("|", "&&", ";") else shlex.quote(w) for w in words).split("\n"):
            words = shlex.split(part.partition(" '>' ")[0])
            while words and (words[0] == "$" or "=" in words[0]):
                words.pop(0)
            if words[:1] == ["outrider"]:
                yield words[1:]


def shell_text(page: Path) -> str:
    """The fenced blocks of a page that are no code of another language."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.M | re.S)
    return "\n".join(block for language, block in blocks if language in ("", "sh", "bash", "console"))


def parse(words: list[str]) -> None:
    """Parse a command line as the program does, and run nothing. Raises what the program would show."""
    assert words[0] in COMMANDS, f"there is no command {words[0]}"
    command, words = COMMANDS[words[0]], words[1:]
    with suppress(typer.Exit):  # of --help
        if (parts := getattr(command, "commands", None)) and words and not words[0].startswith("-"):
            assert words[0] in parts, f"there is no command {command.name} {words[0]}"
            command, words = parts[words[0]], words[1:]
        command.make_context(command.name, words)


# A command in a sentence: in backticks, behind a colon or a semicolon, or at the start. It ends where the sentence goes on.
# "outrider reads ..." is no command, but "outrider plan" is a wrong one.
COMMAND = rf"(?:{'|'.join(COMMANDS)})\b|(?!\w+s |cannot |from )[a-z]"
ADVISED = re.compile(
    rf"(?:(?P<code>`)|(?<=: )|(?<=; )|(?P<start>^))outrider (?P<line>(?:{COMMAND})[^`\n]*)", re.MULTILINE
)
SENTENCE_GOES_ON = re.compile(r"[;.,:]?(?:\s{2,}|[;.,:] | \().*")


def parse_advice(words: list[str], whole: bool) -> None:
    """`parse`. What is not whole may lack what the command requires."""
    try:
        parse(words)
    except Exception as error:
        if whole or type(error).__name__ not in ("MissingParameter", "BadOptionUsage"):
            raise


def advised(text: str) -> Iterator[tuple[list[str], bool]]:
    """The words after `outrider` of each command line in a text, and whether it is whole: it can be typed as it stands.

    What stands in backticks may name a command, or an option of it. It is not whole.
    """
    for found in ADVISED.finditer(text):
        whole = found["code"] is None and found["start"] is None
        line = SENTENCE_GOES_ON.sub("", found["line"]) if whole else found["line"]
        for words in command_lines(f"outrider {line}"):
            yield ["1" if word == "N" else word for word in words if word != "..."], whole


def strings(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of each string of a module. A value in it is that of the module, if that is a text, and 1 otherwise."""
    names = vars(importlib.import_module(module))

    def text(node: ast.expr) -> str | None:
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.JoinedStr):
            return "".join(text(value) or "" for value in node.values)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            sides = text(node.left), text(node.right)
            return None if sides == (None, None) else "".join(side or "1" for side in sides)
        if isinstance(node, ast.FormattedValue):
            if ast.unparse(node.value) == "program()":
                return "outrider"
            with suppress(Exception):
                return str(eval(compile(ast.Expression(node.value), module, "eval"), dict(names)))
            return "1"
        return None

    known = set[ast.AST]()
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and node not in known and (found := text(node)):
            known.update(ast.walk(node))
            yield node.lineno, found


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


SOURCES = [file for file in sorted((ROOT / "outrider").rglob("*.py")) if "outrider " in file.read_text()]


@pytest.mark.parametrize("file", SOURCES, ids=name)
def test_what_errors_and_hints_advise_parses(file: Path) -> None:
    """As `test_command_lines_parse`, for the strings of the source."""
    wrong = list[str]()
    for line, text in strings(module_name(file), ast.parse(file.read_text())):
        for words, whole in advised(text):
            try:
                parse_advice(words, whole)
            except Exception as error:
                wrong.append(f"{name(file)}:{line}: outrider {shlex.join(words)}: {error or type(error).__name__}")
    assert not wrong


@pytest.mark.parametrize(
    "source",
    [
        'raise ValueError(f"{path} has no layers ({error}); make some with: outrider layers MODEL --out {path}")',
        'say("make it again: outrider models pack MODEL, or leave it")',
        'x = "Next: " + "outrider replay " + trace + " --steps 3"',
        'x = f"{program()} sreve {model}"',
        '"""What `outrider tune --secnds 3` does."""',
    ],
)
def test_wrong_advice_is_seen(source: str) -> None:
    [advice] = [one for _, text in strings("outrider", ast.parse(source)) for one in advised(text)]
    with pytest.raises(Exception, match=r"no command|No such option|unexpected extra|issing"):
        parse_advice(*advice)


@pytest.mark.parametrize(
    "line", ["serv x", "serve MODEL --tree-wdth 3", "generate x -k three", "models chekc x", "doctor a b", "batch in"]
)
def test_a_wrong_command_line_is_seen(line: str) -> None:
    [words] = command_lines(f"cat x | outrider {line} > out   # {line}")
    with pytest.raises(Exception, match=r"no command|No such option|valid integer|unexpected extra|issing"):
        parse(words)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_command_lines_parse(page: Path) -> None:
    """Each command line that a page shows has a command, options and arguments that exist, and values that convert."""
    for words in command_lines(shell_text(page)):
        parse(words)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in ("log.md", "CHANGELOG.md")], ids=name)
def test_commands_in_the_text_exist(page: Path) -> None:
    """`outrider COMMAND --option` between words: the command and the option exist, and the values convert.

    The log and the changelog name commands of their day.
    """
    for code in re.findall(r"`outrider [a-z][^`]+`", FENCE.sub("", page.read_text())):
        for advice in advised(" ".join(code.split())):
            parse_advice(*advice)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_examples_of_the_help_parse(command: str) -> None:
    found = [*command_lines(COMMANDS[command].epilog or "")]
    assert found
    for words in found:
        parse(words)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_quick_command_lines_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the page, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    for words in command_lines(shell_text(page)):
        line = shlex.join(words)
        if not any(re.search(pattern, line) for pattern in NOT_RUN):
            done = CliRunner().invoke(app, words)
            assert done.exit_code == 0, f"{name(page)}: outrider {line}\n{done.output}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_conversations_of_the_pages_are_had(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each `outrider run MODEL` of a page, with a built-in model in the place of the page's."""
    monkeypatch.chdir(tmp_path)
    for words in command_lines(shell_text(page)):
        line = shlex.join(words)
        if words[0] == "run" and "://" not in line:
            for pattern, stand_in in STAND_INS.items():
                line = re.sub(pattern, stand_in, line)
            done = CliRunner().invoke(app, [*shlex.split(line), "-n", "2"], input="Hi\n")
            assert done.exit_code == 0, f"{name(page)}: outrider {line}\n{done.output}"


def test_every_page_is_in_the_index() -> None:
    linked = {(DOCS / target).resolve() for target in re.findall(r"\]\(([^)#]+)\)", (DOCS / "index.md").read_text())}
    known = {*linked, ROOT / "README.md", DOCS / "index.md"}
    missing = [name(page) for page in PAGES if page.parent.name != "reference" and page not in known]
    assert not missing, f"docs/index.md does not link to {missing}"


def test_pages_that_the_code_names_exist() -> None:
    for folder in ("outrider", "certify", "lab", "ray", "tests", "benchmarks", "recipes"):
        for file in (ROOT / folder).rglob("*.py"):
            for page in re.findall(r"\bdocs/[\w/]+\.md", file.read_text()):
                assert (ROOT / page).exists(), f"{name(file)} names {page}"


@pytest.mark.parametrize("page", PROSE, ids=name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    files = re.findall(r"`((?:outrider|lab|ray|certify|tests|benchmarks|recipes|docs)/[\w./-]+)`", page.read_text())
    assert not [file for file in files if not (ROOT / file).exists()]


def test_the_page_of_licences_names_each_file_with_data() -> None:
    named = set(re.findall(r"^\| (`[^|]*`) \|", (DOCS / "licences.md").read_text(), re.M))
    paths = {path for cell in named for path in re.findall(r"`([^`]+)`", cell)}
    assert not [path for path in paths if not (ROOT / path).exists()]
    kept = (".json", ".jsonl", ".gz", ".safetensors", ".npz", ".gguf", ".bin")
    data = {
        name(file)
        for folder in ("outrider", "certify/outrider_certify", "benchmarks", "recipes", "tests", "docs")
        for file in (ROOT / folder).rglob("*")
        if file.name.endswith(kept) and "__pycache__" not in file.parts
    }
    missing = {
        file for file in data if file not in paths and not any(file.startswith(p) for p in paths if p[-1] == "/")
    }
    assert len(data) > 60
    assert not missing, f"docs/licences.md does not say what these are: {sorted(missing)}"


def test_no_page_and_no_message_promises_a_package_on_pypi() -> None:
    """outrider is installed from a checkout: `pip install '.[serve]'`."""
    promises = re.compile(r"pip install [^`\n]*'?outrider\b(?!-)[^`\n]*")
    pages = [*PAGES, *sorted((ROOT / "outrider").rglob("*.py"))]
    assert not [name(page) for page in pages if page.name != "log.md" and promises.search(page.read_text())]


def decisions(replayed: str) -> list[tuple[str, str]]:
    """(accepted or rejected, token) of each node of a replayed step."""
    return re.findall(r"── ([✓✗·]) ('[^']*'|\"[^\"]*\")", replayed)


def test_the_replayed_step_is_the_one_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of the page print its tree. README.md draws the same step."""
    page = (DOCS / "guides" / "trace.md").read_text()
    generate, shown = re.findall(r"^```\n(.*?)^```", page, re.M | re.S)[:2]
    config = re.findall(r"'(\{.*\})'", generate)[0]
    trace = str(tmp_path / "run.jsonl")
    options = ["--temperature", "0.8", "--seed", "3", "-n", "24", "--trace", trace, "--speculative-config", config]
    assert all(option in generate for option in options[:6])
    monkeypatch.setenv("COLUMNS", "130")
    written = CliRunner().invoke(app, ["generate", "for i in range(", *options])
    assert written.exit_code == 0, written.output
    replayed = CliRunner().invoke(app, ["replay", trace, "--step", "2"])
    assert replayed.exit_code == 0, replayed.output
    assert decisions(replayed.output) == decisions(shown)
    [picture] = [block for block in FENCE.findall((ROOT / "README.md").read_text()) if "draft tree" in block]
    drawn = re.findall(r'" ?[^"]*"', picture)
    assert {token.strip("'") for _, token in decisions(shown)} <= {token.strip('"') for token in drawn}


def test_the_figures_to_choose_by_are_measured() -> None:
    """Each speedup of the table by task stands in the generated table of docs/performance.md."""
    measured = (DOCS / "performance.md").read_text().split("### One pair")[1].split("### Other precisions")[0]
    table = (DOCS / "guides" / "choose.md").read_text().split("## By task")[1].split("## By what you have")[0]
    cited = re.findall(r"\b\d\.\d\d\b", table)
    assert len(cited) >= 20
    assert not [figure for figure in cited if f" ms, {figure} (" not in measured]


def test_the_reference_is_fresh() -> None:
    generated = runpy.run_path(str(DOCS / "reference.py"))["pages"]()
    late = [name(file) for file, text in generated.items() if not file.exists() or file.read_text() != text]
    late += [name(file) for file in (DOCS / "reference").glob("*.md") if file not in generated]
    if late:
        pytest.fail(
            f"{', '.join(late)}: not what the docstrings say now. Write the pages again, and commit them with your change:\n\n"
            "    python docs/reference.py\n",
            pytrace=False,
        )
