"""The report: what the pipelines' tables say, drawn into one page.

``tables`` reads the lake, ``drawings`` decides what each table is drawn as, ``charts`` has the
kinds of drawings, ``cards`` puts a report together, ``page`` writes the HTML. No Spark is started.
"""

from __future__ import annotations

from trunkline.spark.report.cards import Card, Report, find_lake, read_report
from trunkline.spark.report.charts import Chart
from trunkline.spark.report.drawings import State
from trunkline.spark.report.page import write_page

__all__ = ["Card", "Chart", "Report", "State", "find_lake", "read_report", "write_page"]
