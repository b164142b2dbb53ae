"""The table of options on the page "Launching a job", made from torchrun's parser and ftrun's.

    python docs/options.py

rewrites it in the page. Options that the installed torch does not have yet stay as they are.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from torch.distributed.run import get_args_parser

from ft_wrapper.agent.options import EXPLAINED, OWN, READ_AS_TORCHRUNS, make_parser

PAGE = Path(__file__).parent / "launching.md"
BEGIN, END = "<!-- made by docs/options.py -->\n", "<!-- to here -->\n"
HEAD = "| option | default of torchrun | default of ftrun | what differs |\n| --- | --- | --- | --- |\n"

STANDS_FOR = {"--master-port": "`29500`", "--shutdown-timeout": "`30`"}
"""What torchrun takes where its parser has no default."""

REMARKS = {
    "--rdzv-id": "`etcd` needs one for each job",
    "--rdzv-conf": "a warning for unknown names ([Rendezvous](rendezvous.md))",
    "--redirects": "a warning for ranks that do not exist",
    "--tee": "lines begin with role and rank rather than role and local rank",
    "--local-ranks-filter": "a warning for ranks that do not exist",
    "--log-dir": "a temporary one is removed if nothing was written to it",
    "--log-line-prefix-template": "with older torch, too; without it "
    "`TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE`, else as `--tee`",
    "--signals-to-handle": "with older torch, too",
    "--virtual-local-rank": "with older torch, too",
}
"""What is to be said of options that mean the same."""


def rows() -> dict[str, tuple[str, str, str]]:
    """The cells after each option: torchrun's default, ftrun's, and what differs.

    The first one is empty for what the installed torchrun does not have. No ``PET_`` variable may be set.
    """
    theirs, ours = get_args_parser()._option_string_actions, make_parser()
    own = {
        id(action) for group in ours._action_groups if group.title == OWN for action in group._group_actions
    }
    same, other, alone = {}, {}, {}
    for action in ours._actions:
        if not action.option_strings or action.dest == "help" or action.help == argparse.SUPPRESS:
            continue
        option = max((text for text in action.option_strings if "_" not in text), key=len)
        there = theirs.get(option)
        default = "" if there is None else STANDS_FOR.get(option, _shown(there))
        if id(action) in own:
            alone[option] = (default, _default_of_ours(action), f"*of ftrun alone*: {_help(action)}")
        elif action.dest in READ_AS_TORCHRUNS and option not in EXPLAINED:
            differs = f"the same; {REMARKS[option]}" if option in REMARKS else "the same"
            same[option] = (default, _shown(action), differs)
        else:
            other[option] = (default, _default_of_ours(action), _help(action))
    return {option: part[option] for part in (same, other, alone) for option in sorted(part)}


def on_page() -> dict[str, tuple[str, str, str]]:
    """The same, as the page has it."""
    found = {}
    for line in _parts()[1].splitlines()[2:]:
        option, default, of_ours, differs = (cell.strip() for cell in line.strip("|").split("|"))
        found[re.findall(r"`(--[^`]+)`", option)[-1]] = (default, of_ours, differs)
    return found


def table() -> str:
    """The table, with what the page says of options that the installed torchrun does not have."""
    parser, before, text = make_parser(), on_page(), HEAD
    for option, (default, of_ours, differs) in rows().items():
        if not default and option in before and option not in get_args_parser()._option_string_actions:
            default = before[option][0]
        names = [text for text in parser._option_string_actions[option].option_strings if "_" not in text]
        cells = (", ".join(f"`{name}`" for name in names), default, of_ours, differs)
        text += f"| {' | '.join(cells)} |\n".replace("|  |", "| |").replace("|  |", "| |")
    return text


def _parts() -> tuple[str, str, str]:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    made, _, after = rest.partition(END)
    return before, made, after


def _shown(action: argparse.Action) -> str:
    nothing = action.nargs == 0 or action.default in (None, "", [], argparse.SUPPRESS)
    return "" if nothing else f"`{action.default}`"


def _default_of_ours(action: argparse.Action) -> str:
    said = re.search(r"\(default: ([^)]*)\)", _plain_help(action))
    if said is None:
        return _shown(action)
    return _code(said[1]) if " " in said[1] else f"`{said[1]}`"


def _help(action: argparse.Action) -> str:
    return _code(re.sub(r" \(default: [^)]*\)", "", _plain_help(action), count=1))


def _plain_help(action: argparse.Action) -> str:
    return (action.help or "").replace("%(default)s", str(action.default))


def _code(text: str) -> str:
    """The same with options, variables and the like in backticks."""
    return re.sub(
        r"(--[a-z][a-z-]*|\b[A-Z]+_[A-Z_]+\b|\$\{\w+\}|\bHOST:PORT(?:,HOST:PORT)?\b)", r"`\1`", text
    )


def main() -> None:
    """Writes the table into the page."""
    for name in [name for name in os.environ if name.startswith(("PET_", "TORCH_ELASTIC_"))]:
        del os.environ[name]
    before, _, after = _parts()
    PAGE.write_text(before + BEGIN + table() + END + after)


if __name__ == "__main__":
    main()
