"""The tables and figures of README.md and docs/, written from the history and never typed by hand.

A document contains a table between two comments, each on a line of its own:

    <!-- table: decode -->
    <!-- end of table -->

and a single figure inside a sentence, or inside a cell of another table, between two comments on one line:

    takes <!-- figure: token-fixed-memory -->6.62 ms<!-- end of figure --> (median)

`python -m benchmarks tables` replaces what stands between the comments, in README.md and in every Markdown
file under docs/. `python -m benchmarks tables --check` changes nothing and exits with 1 where a document
differs. Markers inside a fenced code block, or directly after a backtick, are examples and stay as they are.

Each table is a function of `benchmarks.tables.registry.TABLES` from the history to lines of Markdown, and
each figure is a function of `FIGURES` from the history to a short text. `History.newest` in
`benchmarks.tables.runs` decides which run of a case a table shows.
"""
