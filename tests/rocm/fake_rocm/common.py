"""What the stand-ins share: their release, one set of kernels, and the files that profilers write.

FAKE_ROCM names the release, FAKE_FAIL a trap. What they do was seen on the real parsers and launchers, or
read in the real sources. 10.1 also has what single releases before it had: a shell as the program aborts.
"""
import os
import signal

RELEASE = os.environ.get("FAKE_ROCM", "7.0")
FAIL = os.environ.get("FAKE_FAIL", "")
OLD, NEW = RELEASE == "6.3", RELEASE == "10.1"
COUNTERS = ("SQ_WAVES", "GRBM_COUNT", "FETCH_SIZE", "WRITE_SIZE", "OccupancyPercent")

KERNELS = (  # demangled name, launches, nanoseconds of each: as rocprofv3 names the kernels of PyTorch
    ("Cijk_Ailk_Bljk_SB_MT128x128x16_MI32x32x1_SN_1LDSB0_APM1_AF0EM1", 120, 41_250),
    ("attn_fwd.kd", 60, 52_000),
    ("bwd_kernel_dk_dv.kd", 60, 71_500),
    ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float, "
     "float const*, \"quoted, name\")", 180, 6_400),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, float, "
     "at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul> >(int)", 900, 2_050),
    ("triton_poi_fused_add_mul_sigmoid_7.kd", 150, 3_300),
    ("__amd_rocclr_copyBuffer.kd", 12, 9_000),
    ("my_own_kernel(float*)", 6, 1_000),
)
LAUNCHES = sum(calls for _, calls, _ in KERNELS)
TRACE_HEADERS = {
    "rocprofv3": "Kind,Agent_Id,Kernel_Name,Correlation_Id,Start_Timestamp,End_Timestamp",
    "rocprof-compute": "Dispatch_ID,Kernel_Name,Start_Timestamp,End_Timestamp,SQ_WAVES,GRBM_COUNT"}


def write_csv(path, header, rows):
    import csv  # here and below: --help must answer fast
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC)
        writer.writerow(header.split(","))
        writer.writerows(rows)


def write_stats(path, kernels=KERNELS):
    """*_kernel_stats.csv; its header is the same in every release."""
    write_csv(path, "Name,Calls,TotalDurationNs,AverageNs,Percentage,MinNs,MaxNs,StdDev", (
        (name, calls, calls * time, float(time), 1.0, time, time, 0.0)
        for name, calls, time in sorted(kernels, key=lambda kernel: -kernel[1] * kernel[2])))


def dispatches(kernels):
    clock = 5_000_000_000
    for name, calls, time in kernels:
        for _ in range(calls):
            yield name, clock, clock + time
            clock += time + 700


def write_trace(path, tool="rocprofv3", kernels=KERNELS):
    header = TRACE_HEADERS[tool]
    write_csv(path, header, (
        [{"Kernel_Name": name, "Start_Timestamp": start, "End_Timestamp": end, "Agent_Id": "Agent 4",
          "Correlation_Id": number}.get(column, 1) for column in header.split(",")]
        for number, (name, start, end) in enumerate(dispatches(kernels), 1)))


def counter_value(counter):
    """The same for every dispatch: 32 waves, 40%, 2 KB read and 1 KB written."""
    return {"OccupancyPercent": 40.0, "FETCH_SIZE": 2.0, "WRITE_SIZE": 1.0}.get(counter, 32)


def write_counters(path, counters, kernels=KERNELS):
    """*_counter_collection.csv, and results of rocprof-compute from 3.5 on: a row for each dispatch and
    counter."""
    write_csv(path, "Dispatch_Id,Agent_Id,Kernel_Name,Counter_Name,Counter_Value,Start_Timestamp,"
              "End_Timestamp", ((place, "Agent 4", name, counter, counter_value(counter), start, end)
               for place, (name, start, end) in enumerate(dispatches(kernels), 1) for counter in counters))


def write_rocpd(path, kernels=KERNELS, counters=()):
    """A rocpd database, as far as it is read; the real one has more columns."""
    import sqlite3
    symbols = {name: number for number, (name, _, _) in enumerate(kernels, 1)}
    with sqlite3.connect(path) as database:
        database.executescript(
            "CREATE TABLE rocpd_info_kernel_symbol (id INTEGER PRIMARY KEY, guid TEXT, display_name TEXT);"
            "CREATE TABLE rocpd_kernel_dispatch (id INTEGER PRIMARY KEY, guid TEXT, kernel_id INTEGER, "
            'start BIGINT, "end" BIGINT);'
            "CREATE TABLE rocpd_pmc_event (id INTEGER PRIMARY KEY, guid TEXT, pmc_id INTEGER, value REAL);")
        database.executemany("INSERT INTO rocpd_info_kernel_symbol VALUES (?, 'g', ?)",
                             [(number, name) for name, number in symbols.items()])
        database.executemany("INSERT INTO rocpd_kernel_dispatch VALUES (NULL, 'g', ?, ?, ?)",
                             [(symbols[name], start, end) for name, start, end in dispatches(kernels)])
        database.executemany("INSERT INTO rocpd_pmc_event VALUES (NULL, 'g', 1, ?)",
                             [(counter_value(counter),) for counter in counters])
    database.close()


def run_child(argv, **environment):
    """(exit code, pid) of the program. SIGINT reaches the whole group; a profiler outlives it and writes."""
    import subprocess
    signal.signal(signal.SIGINT, lambda number, frame: None)
    child = subprocess.Popen(argv, env={**os.environ, **environment})
    return child.wait(), child.pid


def end_like(code):
    """rocprofv3 execs the program, so the program's fate is its own."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    raise SystemExit(code)
