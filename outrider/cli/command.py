"""How a function becomes a command: its docstring is the help page, and its signature has the options. Imports nothing large.

A parameter that a caller may give by position is an argument of the command line, one by keyword only is an option. The lines
under `Args:` say what each means; one of them may begin with what stands for the value: `out (FILE): The page.`
Parameters that belong together are a group, `outrider.serve.options.Options`. The command takes it as one object.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from pydantic.fields import FieldInfo
from typer.core import TyperCommand
from typer.models import ParameterInfo

from outrider.cli.terminal import readable
from outrider.core.docstrings import arguments, summary
from outrider.serve.options import Options, shown

OTHER_NAMES = {
    "model": "-m", "draft_model": "-d", "num_speculative_tokens": "-k", "temperature": "-t", "max_tokens": "-n", "out": "-o",
    "repeats": "-r", "concurrency": "-c", "step": "-s", "yes": "-y", "method": "--drafter", "stats": "--verbose",
}  # fmt: skip
"""The second name of an option. It means the same in every command."""
MODEL = "A folder, a GGUF file, a hub name or a built-in model."
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel="Output")]


def as_command(
    panel: str, *examples: str, usual: str = "", to: typer.Typer | None = None
) -> Callable[[Callable[..., Any]], typer.Typer]:
    """Make a function a command of its own, an entry point of the group `outrider.commands`.

    Args:
        panel: The heading of the command in the list of commands.
        examples: Lines at the end of its help page.
        usual: The options of a page that does not show all.
        to: A command of which this is a part, in place of one of its own.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode="rich") if to is None else to

    def decorate(function: Callable[..., Any]) -> typer.Typer:
        app.command(
            function.__name__.rstrip("_"),
            help=summary(function),
            epilog="[bold]Examples[/bold]\n" + "\n".join(examples),
            rich_help_panel=panel,
            cls=type("Brief", (BriefCommand,), {"usual": tuple(usual.split())}),
        )(grouped(function))
        return app

    return decorate


def full_name(name: Any) -> Any:
    """The name of the built-in model that a short name means: smollm2 is builtin:smollm2-135m. Others stay, also in a list.

    A file or a folder here goes before a built-in model.
    """
    from outrider.models.builtin.download import DOWNLOADS
    from outrider.models.builtin.shipped import BUILTIN

    if isinstance(name, list):
        return [full_name(one) for one in name]
    if not isinstance(name, str) or Path(name).exists():
        return name
    short_names = {full.removeprefix("builtin:"): full for full in (*BUILTIN, *DOWNLOADS)}
    longer = [full for short, full in short_names.items() if short.startswith(f"{name}-")]
    return short_names.get(name, longer[0] if len(longer) == 1 else name)


class BriefCommand(TyperCommand):
    """A command whose `--help` shows its arguments and the options of `usual`. The page has at most 45 lines of 80 columns."""

    usual: tuple[str, ...] = ()
    """The options to show, by any of their names, in the order of the page; without one, all of them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words of the command line. `--help-all` among them shows all options and ends."""
        if "--help-all" in args:
            super().format_help(ctx, formatter := ctx.make_formatter())
            typer.echo(formatter.getvalue(), nl=False)
            ctx.exit()
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the page. Raises KeyError if `usual` names no option."""
        page, options = copy(self), [p for p in self.params if p.param_type_name == "option"]
        named = {name: option for option in options for name in option.opts}
        shown = [named[name] for name in self.usual] or options
        page.add_help_option = False
        page.params = [p for p in self.params if p not in options] + [_row(option) for option in shown]
        if self.usual:
            page.help = (self.help or "").partition("\n\n")[0]
            examples = "\n".join((self.epilog or "").splitlines()[:4])  # the heading and three
            page.epilog = f"{examples}\n\n[bold]--help-all[/bold] shows all {len(options)} options"
        TyperCommand.format_help(page, ctx, formatter)


def _row(option: Any) -> Any:
    """The same option in two columns: its names and the text. Headings, types and ranges take the width of the text."""
    row, shown = copy(option), option.default
    row.rich_help_panel = row.min = row.max = None
    metavar = "" if (option.metavar or "<").startswith("<") else option.metavar
    row.opts, row.metavar = [" ".join([*sorted(option.opts, key=len), metavar]).strip()], ""
    row.required = row.show_default = False
    if option.required:
        row.help += " Required."
    if isinstance(shown, (int, float, str)) and not isinstance(shown, bool) and "efault" not in row.help:
        row.help += f" Default: {shown}."
    return row


def grouped(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let typer see each field of a command's option groups as a parameter of its own, and what the docstring says of each.

    A group is `Options`, or a dataclass with typer's annotations. For `Annotated[dict, X]` a command gets what was given for X,
    to make it with more. Each command has --debug, and shows its errors in one line without it.
    The order of the parameters, and of the fields in a group, is the order in the help page. Raises ValueError if two groups
    have a field of the same name.
    """
    hints, texts = get_type_hints(command, include_extras=True), arguments(command)
    parameters, groups = list[Parameter](), dict[str, tuple[Callable[..., Any], list[str]]]()
    for name, parameter in signature(command).parameters.items():
        make, kind = hints[name], hints[name]
        if get_args(kind)[:1] == (dict[str, Any],):
            make, kind = _dict, kind.__metadata__[0]
        if isinstance(kind, type) and issubclass(kind, Options):
            members = [_of_field(field, one) for field, one in shown(kind).items()]
        elif is_dataclass(kind):  # of a package without `Options`
            types = get_type_hints(kind, include_extras=True)
            defaults = [(f.name, Parameter.empty if f.default is MISSING else f.default) for f in fields(kind)]
            members = [Parameter(n, Parameter.KEYWORD_ONLY, default=d, annotation=types[n]) for n, d in defaults]
        else:
            if not any(isinstance(one, ParameterInfo) for one in getattr(kind, "__metadata__", ())):
                kind = _of_parameter(parameter, kind, *texts.get(name, ("", "")))
            parameters.append(parameter.replace(annotation=kind, kind=Parameter.KEYWORD_ONLY))
            continue
        parameters += members
        groups[name] = make, [one.name for one in members]
    parameters.append(Parameter("debug", Parameter.KEYWORD_ONLY, default=False, annotation=Debug))

    @wraps(command)
    def run(debug: bool, **values: Any) -> Any:
        with readable(debug):
            objects = {
                name: make(**{field: values.pop(field) for field in names}) for name, (make, names) in groups.items()
            }
            return command(**values, **objects)

    run.__signature__ = Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _dict(**given: Any) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def option_names(name: str, kind: Any, default: Any) -> list[str]:
    """What an option is called on the command line."""
    long = f"--{name.strip('_').replace('_', '-')}"
    if kind is bool and default is True:
        long += f"/--no-{long[2:]}"
    return [long, OTHER_NAMES[name]] if name in OTHER_NAMES else [long]


def _of_parameter(parameter: Parameter, kind: Any, text: str, placeholder: str) -> Any:
    """A parameter of a command as typer wants its type: with the help, and the limits of `Annotated[T, Field(ge=1)]`.

    One that is called `model` takes short names of built-in models, too.
    """
    kind, *more = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    details: dict[str, Any] = {"callback": full_name} if parameter.name == "model" else {}
    text = text or MODEL * bool(details)
    for one in (limit for field in more for limit in field.metadata):
        details |= {name: getattr(one, end) for name, end in (("min", "ge"), ("max", "le")) if hasattr(one, end)}
    if parameter.kind is Parameter.KEYWORD_ONLY or kind is bool:
        names = option_names(parameter.name, kind, parameter.default)
        return Annotated[kind, typer.Option(*names, help=text, metavar=placeholder or None, **details)]
    metavar = placeholder or parameter.name.strip("_").upper()
    return Annotated[kind, typer.Argument(help=text, metavar=metavar, **details)]


def _of_field(name: str, field: FieldInfo) -> Parameter:
    """A field of a group as typer wants it. A list has no default there: without one it is left out."""
    extra: Any = field.json_schema_extra
    kind: Any = extra["kind"] or field.annotation
    default = field.get_default(call_default_factory=True)
    if default == []:
        kind, default = kind | None, None
    names = extra["names"] or option_names(name, kind, default)
    option = typer.Option(*names, help=field.description or "", rich_help_panel=extra["panel"], **extra["typer"])
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])
