"""Turns what runs wrote (JSON lines, one summary per run) into figures and self-contained HTML reports.

  logs     reads and checks the files of one run
  config   reads configuration files and scales their schedules
  compare  merges runs into the figures of a comparison
  figures  draws, returns SVG text
  lanes    draws the time line of a few steps
  page     puts text, tables and figures into one HTML file
  sections the parts that reports share
  machine  says what the figures were measured on
  net      draws what the network benchmarks measured
  several  the report of any number of runs, and their table in Markdown
  quickstart  the report of the quickstart, and its command line

Needs Python 3.9 with matplotlib and numpy, nothing else.
"""
