"""The command line: `commands` trains and reports, `describe` says what there is; others have modules of their name."""

from fedveil.cli.audit import audit
from fedveil.cli.choose import choose
from fedveil.cli.commands import app, main
from fedveil.cli.deploy import deploy
from fedveil.cli.describe import describe, inspect, list_
from fedveil.cli.export import export
from fedveil.cli.fedage import fedage
from fedveil.cli.frontier import frontier
from fedveil.cli.privacy import privacy
from fedveil.cli.tune import tune

app.command("list")(list_)
app.command()(describe)
app.command()(inspect)
app.add_typer(deploy, name="deploy")
app.add_typer(fedage, name="fedage")
app.command()(audit)
app.command()(choose)
app.command()(export)
app.command()(frontier)
app.command()(privacy)
app.command()(tune)

__all__ = ["app", "main"]
