"""Orders as a table: publish some, count them in Spark, and send the totals back to the bus."""

from __future__ import annotations

import asyncio
import tempfile

import trunkline
from trunkline.spark import session


async def publish(url: str) -> None:
    async with trunkline.connect(url) as bus:
        for customer in ("ann", "bob", "ann", "cid", "ann"):
            await bus.publish("orders", {"total": len(customer) * 10}, key=customer, type="placed")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        url = f"file:{folder}"
        asyncio.run(publish(url))
        spark = session("orders", quick=True)
        orders = spark.read.format("trunkline").options(url=url, subscribe="orders").load()
        totals = orders.selectExpr("key", "get_json_object(value, '$.total') AS total")
        totals = totals.groupBy("key").agg({"total": "sum"}).toDF("key", "total")
        events = totals.selectExpr("key", "to_json(struct(total)) AS value", "'total' AS type")
        events.write.format("trunkline").options(url=url, topic="totals").mode("append").save()
        for row in (
            (spark.read.format("trunkline").options(url=url, subscribe="totals").load())
            .orderBy("key")
            .collect()
        ):
            print(row.key, row.value)


if __name__ == "__main__":
    main()
