"""Help texts of the commands: grouped, in the width of the terminal, with examples; in colours on a
terminal only."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

# Examples by command, as typed. A test parses each of them.
EXAMPLES: Mapping[str, Sequence[str]] = {
    "millrace": (
        "millrace up",
        "millrace status",
        'millrace publish --prompt "What is a KV cache?" --stream',
        "millrace COMMAND --help",
    ),
    "millrace up": (
        "millrace up --port 9000 --workers 2 --gateways 2",
        "millrace up --model PATH",
        "millrace up --model PATH --pipeline-parallel 2 --remote-stages 1",
        "millrace up --autoscale 1:4 --engine simulated",
        "millrace up --host 0.0.0.0 --config settings.yaml",
    ),
    "millrace status": ("millrace status", "millrace status --json --data DIR"),
    "millrace logs": (
        "millrace logs gateway worker-1 --since 10m",
        "millrace logs --follow",
        "millrace logs scheduler -n 20 --raw",
    ),
    "millrace down": ("millrace down", "millrace down --wait 2m --data DIR"),
    "millrace stages": (
        "millrace stages --join 10.0.0.5:7500 --model ./large --token-file token",
        "millrace stages --join 127.0.0.1:7500 --max-stages 2",
    ),
    "millrace models": ("millrace models list", "millrace models add NAME --model PATH"),
    "millrace models list": ("millrace models list --json",),
    "millrace models add": (
        "millrace models add chat-7b --model ./chat-7b --workers 2",
        "millrace models add tiny --model ./tiny-q4_k_m.gguf",
        "millrace models add big --model PATH --engine vllm",
        "millrace models add far --model PATH --engine openai --engine-url http://10.0.0.5:8000/v1",
    ),
    "millrace models remove": ("millrace models remove chat-7b",),
    "millrace models promote": (
        "millrace models promote chat@v2 --canary 10 --step 20 --abort-if 'error_rate>0.01'",
        "millrace models promote chat@v2 --model ./chat-v2",
    ),
    "millrace models rollback": ("millrace models rollback chat",),
    "millrace models retire": ("millrace models retire chat@v1",),
    "millrace models rollouts": ("millrace models rollouts --json",),
    "millrace workers": ("millrace workers list", "millrace workers drain worker-1"),
    "millrace workers list": ("millrace workers list --json",),
    "millrace workers drain": ("millrace workers drain worker-1 --timeout 60",),
    "millrace workers move": ("millrace workers move worker-1 --to worker-2",),
    "millrace workers role": ("millrace workers role worker-2 prefill",),
    "millrace publish": (
        'millrace publish --prompt "What is a KV cache?" --stream',
        "millrace publish --file question.txt --no-wait --tenant acme --tier pro",
    ),
    "millrace result": ("millrace result REQUEST_ID --timeout 5",),
    "millrace generate": (
        "millrace generate --input in.jsonl --output out.jsonl",
        "millrace generate --model PATH --input in.jsonl --output out.jsonl --max-batch 32",
    ),
    "millrace embed": ("millrace embed --model PATH --input texts.jsonl --normalize",),
    "millrace quantize": (
        "millrace quantize --model PATH --output FOLDER --scheme w8a8-int8",
        "millrace quantize --model PATH --output FOLDER --scheme w4a16 --calibrate texts.jsonl",
    ),
    "millrace bench": (
        "millrace bench --concurrency 32 --duration 30s",
        "millrace bench --rate 20 --duration 60s --warm-up 10s --slo ttft=300ms,tpot=50ms",
        "millrace bench --api websocket --rate 100 --requests 5000 --processes 2 --json run.json",
        "millrace bench --compare before.json after.json",
    ),
    "millrace simulate": (
        "millrace simulate synthesise --kind bursty --rate 50 --duration 10m",
        "millrace simulate --trace trace.jsonl --workers 8 --policy fair,fifo --slo ttft=1s",
        "millrace simulate --trace trace.jsonl --workers 2 --autoscale 1:16 --start-time 30s",
        "millrace simulate --trace trace.jsonl --workers 8 --fail worker=3@120s --json run.json",
        "millrace simulate --from-clickhouse --since 2026-01-31 --until 2026-02-01 --workers 4",
    ),
    "millrace simulate synthesise": (
        "millrace simulate synthesise --kind bursty --rate 50 --duration 10m",
    ),
    "millrace adapters": ("millrace adapters COMMAND --help",),
    "millrace adapters list": ("millrace adapters list",),
    "millrace adapters add": (
        "millrace adapters add sql adapters/sql",
        "millrace adapters add sql adapters/sql --model demo --tenant acme",
    ),
    "millrace adapters remove": ("millrace adapters remove sql",),
    "millrace keys": ("millrace keys create --tenant acme", "millrace keys list"),
    "millrace keys create": (
        "millrace keys create --tenant acme --tier pro --requests-per-minute 100",
        "millrace keys create --tenant operators --admin",
    ),
    "millrace keys list": ("millrace keys list --tenant acme", "millrace keys list --json"),
    "millrace keys revoke": ("millrace keys revoke 5f0c2e9b71aa",),
    "millrace keys tenant": (
        "millrace keys tenant acme --show",
        "millrace keys tenant acme --tier pro --monthly-budget 100 --requests-per-minute none",
    ),
    "millrace sql": (
        'millrace sql "SELECT count() FROM requests FINAL"',
        "millrace sql --list",
        "millrace sql --saved latency_percentiles --param from_s=-3600",
    ),
    "millrace usage": (
        "millrace usage --from 2026-11-01 --to 2026-12-01 --by model",
        "millrace usage --tenant acme --from 2026-11-01 --invoice --format csv",
    ),
    "millrace top": ("millrace top", "millrace top --once"),
    "millrace migrate": ("millrace migrate --dry-run", "millrace migrate --config settings.yaml"),
}
_WIDEST = 100
_HELP_COLUMN = 28


class Parser(argparse.ArgumentParser):
    """Parser of ``millrace`` or of one of its commands; ``groups`` puts its commands' names under
    headings, in the order of their lines."""

    def __init__(self, *args: Any, groups: Mapping[str, str] | None = None, **options: Any) -> None:
        """Create a parser.

        Args:
            groups: The heading of each command, by its name.
        """
        options.setdefault("formatter_class", _plain)
        super().__init__(*args, **options)
        self._groups = groups or {}

    def add_subparsers(self, **options: Any) -> Any:
        # Without ``prog``, argparse formats a usage line at each start of the command.
        return super().add_subparsers(**{"prog": self.prog, **options})

    def format_help(self) -> str:
        formatter = _rich(self.prog)
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group in self._action_groups:
            actions = group._group_actions
            if self._groups and any(map(_is_of_commands, actions)):
                self._add_commands(formatter, actions)
            else:
                formatter.start_section(group.title)
                formatter.add_text(group.description)
                formatter.add_arguments(actions)
                formatter.end_section()
        examples = EXAMPLES.get(self.prog)
        return formatter.format_help() + (_examples(examples) if examples else "")

    def _add_commands(
        self, formatter: argparse.HelpFormatter, actions: Sequence[argparse.Action]
    ) -> None:
        commands = [
            command
            for action in actions
            if isinstance(action, argparse._SubParsersAction)
            for command in action._get_subactions()
        ]
        for heading in dict.fromkeys(self._groups.values()):
            formatter.start_section(heading)
            formatter.add_arguments(
                [command for command in commands if self._groups.get(command.dest) == heading]
            )
            formatter.end_section()


def _is_of_commands(action: argparse.Action) -> bool:
    return isinstance(action, argparse._SubParsersAction)


def _width() -> int:
    return max(40, min(_WIDEST, shutil.get_terminal_size().columns) - 2)


def _plain(prog: str) -> argparse.HelpFormatter:
    """Return the formatter of the usage line before an error, which goes to standard error."""
    return argparse.HelpFormatter(prog, max_help_position=_HELP_COLUMN, width=_width())


def _rich(prog: str) -> argparse.HelpFormatter:
    from rich_argparse import RichHelpFormatter

    class Formatter(RichHelpFormatter):
        group_name_formatter: ClassVar[Callable[[str], str]] = staticmethod(str.capitalize)
        # Brackets in help texts are not markup.
        help_markup = text_markup = False

    return Formatter(prog, max_help_position=_HELP_COLUMN, width=_width())


def _examples(commands: Sequence[str]) -> str:
    """Render examples for copying: lines are never broken."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    with console.capture() as captured:
        console.print()
        console.print(Text("Examples:", style="dark_orange"))
        for command in commands:
            console.print(Text(f"  {command}"), soft_wrap=True)
    return captured.get()
