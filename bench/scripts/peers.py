"""Code of the scripts that time peers (other implementations): the device, the request, the measurement, and the answers.

`gemmule-bench` writes this file and a script to a temporary folder, and runs the script
with a request, which is a JSON file. The script prints one JSON object per line, of three kinds:

    {"item": 3, "who": "torch", "us": 1.25}          a measurement in microseconds
    {"item": 3, "who": "torch", "error": "..."}      a failed measurement
    {"done": 4}                                      number of items of the request that are finished

With --probe it prints {"device": ..., "torch": ...} and measures nothing. A script that cannot run
here states the reason in one sentence on standard error, and exits with NO_TORCH or NO_DEVICE.
"""
import argparse, json, os, statistics, sys

NO_TORCH, NO_DEVICE = 3, 4

# Only answers may be on standard output. Libraries may print to it, so redirect their output to standard error.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

# Min size in bytes of all operand sets together, which exceeds L2 caches (50 or 60 MB).
ROTATED_BYTES = 300_000_000
MOST_SETS, LAUNCHES, ENOUGH_MS, WARM_UP_MS, REPLAYS = 64, 64, 5.0, 10.0, 20


def give_up(code, sentence):
    print(sentence, file=sys.stderr)
    sys.exit(code)


def answer(**line):
    print(json.dumps(line), file=answers, flush=True)


def start(description):
    """Imports torch, selects its device, and returns the request. With --probe, answers and ends the process."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--request", help="JSON file with the request")
    parser.add_argument("--device", type=int, default=0, help="number of the CUDA device")
    parser.add_argument("--probe", action="store_true", help="print the device and the version of PyTorch, and exit")
    args = parser.parse_args()
    try:
        import torch
    except ImportError as error:
        give_up(NO_TORCH, f"PyTorch cannot be imported by {sys.executable}: {error}")
    n_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if args.device >= n_devices:
        give_up(NO_DEVICE, f"PyTorch {torch.__version__} of {sys.executable} sees {n_devices} CUDA devices, so cuda:{args.device} is not there")
    torch.cuda.set_device(args.device)
    if args.probe:
        answer(device=torch.cuda.get_device_name(args.device), torch=torch.__version__)
        sys.exit(0)
    if not args.request:
        parser.error("give --request, or --probe")
    torch.set_grad_enabled(False)
    torch.manual_seed(1)
    torch._dynamo.config.cache_size_limit = 512
    with open(args.request) as file:
        return json.load(file)


def dtype_of(request):
    import torch
    return {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[request["dtype"]]


def n_sets(n_bytes):
    """Returns the number of operand sets of `n_bytes` each that are needed so that no set is in L2 when it is read."""
    return max(2, min(MOST_SETS, -(-ROTATED_BYTES // max(n_bytes, 1))))


def graph_of(calls):
    """Returns a CUDA graph of the calls, and their results. Each call first runs twice outside the graph, so that
    it is compiled and tuned before the capture."""
    import torch
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Keep the results, so that each call has a separate one. A shared result would stay in L2.
        results = [call() for call in calls]
    return graph, results


def rotated_us(calls):
    """Returns the microseconds of one call. `calls` do the same on different operands. The time is the median over
    replays of a CUDA graph that contains all calls, once or several times."""
    import torch
    for call in calls:
        call()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(); calls[0](); end.record(); end.synchronize()
    launches = max(1, min(LAUNCHES, int(ENOUGH_MS / max(begin.elapsed_time(end), 1e-3)) + 1))
    calls = calls * -(-launches // len(calls))
    graph, results = graph_of(calls)
    times, warmed = [], 0.0
    while len(times) < REPLAYS:
        # Replay the graph once before the timed replay, so that the device is busy while the host enqueues the events.
        graph.replay(); begin.record(); graph.replay(); end.record(); end.synchronize()
        ms = begin.elapsed_time(end)
        if warmed < WARM_UP_MS:
            warmed += 2 * max(ms, 1e-3)
        else:
            times.append(ms)
    return statistics.median(times) * 1e3 / len(calls)


def run(item, who, measure):
    """Prints an answer with the result of `measure`, or with the reason why it failed."""
    import torch
    try:
        answer(item=item, who=who, us=measure())
    except Exception as error:
        answer(item=item, who=who, error=f"{type(error).__name__}: {str(error)[:300]}")
        try:
            # After a device fault, this fails and ends the script; after a refused kernel, it succeeds.
            torch.cuda.synchronize()
        except Exception as fault:
            give_up(1, f"the device failed in `{who}`: {str(fault)[:300]}")
