"""The generated app, without a package."""


def loader(folder):
    """`load` of the deployment in `folder`."""
    space = {"__file__": str(folder / "app" / "data.py")}
    exec(compile((folder / "app" / "data.py").read_text(), "data.py", "exec"), space)
    return space["load"]
