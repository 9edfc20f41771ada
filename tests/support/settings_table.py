"""The table in docs/settings.md, from the settings: `python -m tests.settings_table`."""

from kvroute.settings.help import env_names, flags, option
from kvroute.settings.serve import OPTIONS


def settings_table() -> str:
    """Markdown, one row for each setting."""
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
