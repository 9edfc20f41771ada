"""The README's table of settings, from the settings: `python -m tests.settings_table`."""

from router.command.options import env_names, flags, option
from router.settings import ServeSettings


def settings_table() -> str:
    """Markdown, one row for each setting."""
    rows = ["| option | environment | default | |", "|---|---|---|---|"]
    for name, field in ServeSettings.model_fields.items():
        described = option(field)
        default = described.default or f"`{field.default}`"
        names = " ".join(f"`{env}`" for env in env_names(name, field))
        if field.default == "" and not described.default:
            default = ""
        rows.append(f"| `{flags(name, field)[0]}` | {names} | {default} | {described.help} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(settings_table())
