"""Names that users give are shown as they are."""

from rich.table import Table

from app.plain_console import plain_console, print_whole

ODD = "a[red]b[/q] :rocket: " + "x" * 200


def test_odd_names_are_shown_whole_in_lines_and_tables(capsys):
    plain_console().print(ODD)
    assert capsys.readouterr().out == f"{ODD}\n"
    table = Table("name", box=None)
    table.add_row(ODD, style="bold")
    print_whole(table)
    assert ODD in capsys.readouterr().out
