"""Generates the table in docs/settings.md: `python -m tests.support.settings_table` prints it."""

from kvroute.settings.help import env_names, flags, option
from kvroute.settings.serve import OPTIONS


def settings_table() -> str:
    """Return a table in Markdown with a row for each setting."""
    rows = ["| option | environment | default | |", "|---|---|---|---|"]
    for name, field in OPTIONS.items():
        described = option(field)
        default = described.default or f"`{field.default}`"
        names = " ".join(f"`{env}`" for env in env_names(name, field))
        if field.default in ("", None) and not described.default:
            default = ""
        spellings = " ".join(f"`{flag}`" for flag in flags(name, field))
        rows.append(f"| {spellings} | {names} | {default} | {described.help} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(settings_table())
