"""Reports a job's progress to Kubeflow Trainer: what `ftrun` has at /metrics becomes the TrainJob's status.

python trainer_progress.py --metrics http://localhost:9464/metrics --steps 100000

Start it next to `ftrun` in its container, with which it ends. All pods report the same step.
"""

import argparse
import datetime
import json
import os
import re
import ssl
import sys
import time
import urllib.request

# Each name in the status, with the sample's name in our metrics; samples with labels are added up.
SHOWN = {"restarts": "ft_wrapper_restarts_total", "rank_failures": "ft_wrapper_rank_failures_total"}


def read(text):
    """The value of each metric, by its name."""
    values = {}
    for name, value in re.findall(r"^(\w+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE):
        values[name] = values.get(name, 0.0) + float(value)
    return values


def status(values, steps, first, now):
    """The status after a step; ``first`` is an earlier step and its time, for the time that remains."""
    step = min(values["ft_wrapper_step"], steps)
    found = {
        "progressPercentage": int(100 * step / steps),
        "metrics": [{"name": name, "value": f"{values.get(ours, 0):g}"} for name, ours in SHOWN.items()],
        "lastUpdatedTime": datetime.datetime.now(datetime.UTC).isoformat(),
    }
    if step > first[0]:
        found["estimatedRemainingSeconds"] = int((steps - step) * (now - first[1]) / (step - first[0]))
    return {"trainerStatus": found}


def post(body):
    """Sends a status; Trainer sets these variables, and replaces the token now and then."""
    with open(os.environ["KUBEFLOW_TRAINER_SERVER_TOKEN"]) as file:
        headers = {"Authorization": f"Bearer {file.read().strip()}", "Content-Type": "application/json"}
    url, ca = os.environ["KUBEFLOW_TRAINER_SERVER_URL"], os.environ.get("KUBEFLOW_TRAINER_SERVER_CA_CERT")
    context = ssl.create_default_context(cafile=ca) if url.startswith("https:") else None
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    urllib.request.urlopen(request, timeout=10, context=context).close()


def main():
    """Reports every so often."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--metrics", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=float, default=30.0, metavar="SECONDS")
    args = parser.parse_args()
    if "KUBEFLOW_TRAINER_SERVER_URL" not in os.environ:
        print("Trainer takes no status: its feature gate TrainJobStatus is off", file=sys.stderr)
        return
    first = None
    while True:
        try:
            with urllib.request.urlopen(args.metrics, timeout=60) as answer:
                values = read(answer.read().decode())
            if "ft_wrapper_step" in values:
                now = time.monotonic()
                first = first or (values["ft_wrapper_step"], now)
                post(status(values, args.steps, first, now))
        except OSError as error:
            print(f"no progress reported: {error}", file=sys.stderr)
        time.sleep(args.every)


if __name__ == "__main__":
    main()
