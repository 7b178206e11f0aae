"""The command line: `commands` says what there is; the other modules say how it looks and where it goes."""

from fedveil.cli.audit import audit
from fedveil.cli.commands import app, main
from fedveil.cli.deploy import deploy
from fedveil.cli.export import export
from fedveil.cli.fedage import fedage
from fedveil.cli.privacy import privacy

app.add_typer(deploy, name="deploy")
app.add_typer(fedage, name="fedage")
app.command()(audit)
app.command()(export)
app.command()(privacy)

__all__ = ["app", "main"]
