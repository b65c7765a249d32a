"""Write the table of presets into docs/reproducing.md: ``python docs/generate_presets.py``."""

from __future__ import annotations

from pathlib import Path

from fedspan.reproduction.presets import list_presets

PAGE = Path(__file__).with_name("reproducing.md")
MARK = "<!-- presets -->\n"


def format_rows() -> str:
    """A table with a row for each preset."""
    lines = ["| preset | item | content | methods |", "|---|---|---|---|"]
    for preset in list_presets():
        lines.append(f"| `{preset.id}` | {preset.item} | {preset.title} | {', '.join(preset.methods)} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with a current table."""
    before, _, rest = text.partition(MARK)
    _, _, after = rest.partition(MARK)
    return f"{before}{MARK}{format_rows()}{MARK}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE}")
