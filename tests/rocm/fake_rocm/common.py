"""What the stand-ins share: their generation, one set of kernels, and the files that profilers write.

FAKE_ROCM names the release, `wheels` for one from pip, `next` for what is announced; FAKE_FAIL names a trap.
What they do was seen on the real parsers and launchers, or read in the real sources.
"""
import os
import signal

RELEASE = os.environ.get("FAKE_ROCM", "7.0")
WHEELS = RELEASE == "wheels"
FAIL = os.environ.get("FAKE_FAIL", "")
ORDER = ("6.3", "6.4", "7.0", "7.1", "7.2", "7.12", "7.13", "7.14", "10.0", "10.1", "next")
COUNTERS = ("SQ_WAVES", "GRBM_COUNT", "SQ_BUSY_CYCLES", "FETCH_SIZE", "WRITE_SIZE", "OccupancyPercent")

KERNELS = (  # demangled name, launches, nanoseconds of each: as rocprofv3 names the kernels of PyTorch
    ("Cijk_Ailk_Bljk_SB_MT128x128x16_MI32x32x1_SN_1LDSB0_APM1_AF0EM1", 120, 41_250),
    ("Cijk_S_PostGSU8_VW4", 40, 3_100),
    ("attn_fwd.kd", 60, 52_000),
    ("bwd_kernel_dk_dv.kd", 60, 71_500),
    ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float, "
     "float const*, \"quoted, name\")", 180, 6_400),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, float, "
     "at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul> >(int)", 900, 2_050),
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float, "
     "at::native::sum_functor<float> > > >(at::native::ReduceOp)", 75, 8_800),
    ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 3, 128, 1>(float*)",
     30, 4_000),
    ("triton_poi_fused_add_mul_sigmoid_7.kd", 150, 3_300),
    ("triton_per_fused_native_layer_norm_3.kd", 30, 5_200),
    ("__amd_rocclr_copyBuffer.kd", 12, 9_000),
    ("my_own_kernel(float*)", 6, 1_000),
)
TRACE_HEADERS = {
    "6.3": ("Kind", "Agent_Id", "Queue_Id", "Thread_Id", "Dispatch_Id", "Kernel_Id", "Kernel_Name",
            "Correlation_Id", "Start_Timestamp", "End_Timestamp", "Private_Segment_Size",
            "Group_Segment_Size", "Workgroup_Size_X", "Workgroup_Size_Y", "Workgroup_Size_Z",
            "Grid_Size_X", "Grid_Size_Y", "Grid_Size_Z"),
    "7.0": ("Kind", "Agent_Id", "Queue_Id", "Stream_Id", "Thread_Id", "Dispatch_Id", "Kernel_Id",
            "Kernel_Name", "Correlation_Id", "Start_Timestamp", "End_Timestamp", "LDS_Block_Size",
            "Scratch_Size", "VGPR_Count", "Accum_VGPR_Count", "SGPR_Count", "Workgroup_Size_X",
            "Workgroup_Size_Y", "Workgroup_Size_Z", "Grid_Size_X", "Grid_Size_Y", "Grid_Size_Z"),
    "rocpd convert": ("Guid", "Kind", "Agent_Id", "Queue_Id", "Stream_Id", "Thread_Id", "Dispatch_Id",
                      "Kernel_Id", "Kernel_Name", "Correlation_Id", "Start_Timestamp", "End_Timestamp",
                      "Lds_Block_Size", "Scratch_Size", "Vgpr_Count", "Accum_Vgpr_Count", "Sgpr_Count",
                      "Workgroup_Size_X", "Grid_Size_X", "Duration"),
    "rocprof-compute": ("Dispatch_ID", "GPU_ID", "Grid_Size", "Workgroup_Size", "Kernel_Name",
                        "Start_Timestamp", "End_Timestamp", "SQ_WAVES", "GRBM_COUNT", "SQ_BUSY_CYCLES"),
}
TRACE_HEADERS["rocprof-compute 3.2"] = (*TRACE_HEADERS["rocprof-compute"], "SQ_ACCUM_PREV_HIRES")


def gpu():
    """"gfx90a", or what the test's record of the driver says."""
    import pathlib
    for path in pathlib.Path(os.environ.get("KFD_TOPOLOGY", "/nonexistent")).glob("*/properties"):
        number = int(path.read_text().split("gfx_target_version ")[1].split()[0])
        return f"gfx{number // 10000}{number // 100 % 100:x}{number % 100:x}"
    return "gfx90a"


def at_least(release):
    return ORDER.index("7.14" if WHEELS else RELEASE) >= ORDER.index(release)


def below(release):
    return not at_least(release)


def write_stats(path, kernels=KERNELS):
    """*_kernel_stats.csv; its header is the same in every generation."""
    import csv  # here and below: --help must answer fast
    total = sum(calls * time for _, calls, time in kernels)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC)
        writer.writerow(["Name", "Calls", "TotalDurationNs", "AverageNs", "Percentage", "MinNs", "MaxNs",
                         "StdDev"])
        for name, calls, time in sorted(kernels, key=lambda kernel: -kernel[1] * kernel[2]):
            writer.writerow([name, calls, calls * time, float(time), 100 * calls * time / total, time, time,
                             0.0])


def dispatches(kernels=KERNELS):
    clock = 5_000_000_000
    for name, calls, time in kernels:
        for _ in range(calls):
            yield name, clock, clock + time
            clock += time + 700


def write_trace(path, generation, kernels=KERNELS):
    import csv
    header = TRACE_HEADERS[generation]
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC)
        writer.writerow(header)
        for number, (name, start, end) in enumerate(dispatches(kernels), 1):
            known = {"Kernel_Name": name, "Start_Timestamp": start, "End_Timestamp": end, "Kind":
                     "KERNEL_DISPATCH", "Dispatch_Id": number, "Agent_Id": "Agent 4",
                     "Correlation_Id": number, "Duration": end - start}
            writer.writerow([known.get(column, 1) for column in header])


TABLES = {  # as far as they are read; the real ones have more columns
    "rocpd_string": "id INTEGER PRIMARY KEY, guid TEXT, string TEXT",
    "rocpd_event": "id INTEGER PRIMARY KEY, guid TEXT, category_id INTEGER, stack_id INTEGER, extdata TEXT",
    "rocpd_region": 'id INTEGER PRIMARY KEY, guid TEXT, tid INTEGER, start BIGINT, "end" BIGINT, '
                    "name_id INTEGER, event_id INTEGER",
    "rocpd_info_kernel_symbol": "id INTEGER PRIMARY KEY, guid TEXT, display_name TEXT",
    "rocpd_kernel_dispatch": "id INTEGER PRIMARY KEY, guid TEXT, kernel_id INTEGER, start BIGINT, "
                             '"end" BIGINT, agent_id INTEGER, event_id INTEGER',
    "rocpd_info_pmc": "id INTEGER PRIMARY KEY, guid TEXT, name TEXT",
    "rocpd_pmc_event": "id INTEGER PRIMARY KEY, guid TEXT, event_id INTEGER, pmc_id INTEGER, value REAL",
    "rocpd_memory_copy": 'id INTEGER PRIMARY KEY, guid TEXT, start BIGINT, "end" BIGINT, '
                         "dst_agent_id INTEGER, event_id INTEGER"}
OF_GRAPHS = ("rocpd_kernel_dispatch", "rocpd_memory_copy")  # from schema 3.0.2 on


class Rocpd:
    """A rocpd database: tables with a guid in their names, and views over them. The number of a HIP call is
    the `stack_id` of its own event and of the events of what it launched."""

    def __init__(self, path, graphs=False):
        import sqlite3
        self.connection, self.strings = sqlite3.connect(path), {}
        for name, columns in TABLES.items():
            columns += ", graph_exec_id INTEGER, graph_node_id INTEGER" * (graphs and name in OF_GRAPHS)
            self.connection.execute(f"CREATE TABLE {name}_abc ({columns})")
            self.connection.execute(f"CREATE VIEW {name} AS SELECT * FROM {name}_abc")

    def add(self, table, **values):
        values = dict(guid="abc", **values)
        names, places = ", ".join(f'"{name}"' for name in values), ", ".join("?" * len(values))
        return self.connection.execute(f"INSERT INTO {table}_abc ({names}) VALUES ({places})",
                                       list(values.values())).lastrowid

    def string(self, text):
        if text not in self.strings:
            self.strings[text] = self.add("rocpd_string", string=text)
        return self.strings[text]

    def event(self, category, number=0, about="{}"):
        return self.add("rocpd_event", category_id=self.string(category), stack_id=number, extdata=about)

    def region(self, category, name, thread, start, end, number=0, about="{}"):
        self.add("rocpd_region", tid=thread, start=start, end=end, name_id=self.string(name),
                 event_id=self.event(category, number, about))

    def marker(self, text, thread, start, end):
        import json
        self.region("MARKER_CORE_RANGE_API", "roctxThreadRangeA", thread, start, end,
                    about=json.dumps({"message": text}))

    def kernel(self, symbol, start, end, number=0, **graph):
        event = self.event("KERNEL_DISPATCH", number)
        self.add("rocpd_kernel_dispatch", kernel_id=symbol, start=start, end=end, agent_id=4, event_id=event,
                 **graph)
        return event

    def close(self):
        self.connection.commit()
        self.connection.close()


def write_rocpd(path, kernels=KERNELS, counters=(), copies=0, calls=False, markers=False, graphs=False):
    """The same as the CSV files of a run."""
    database = Rocpd(path, graphs)
    symbols = {name: database.add("rocpd_info_kernel_symbol", display_name=name) for name, _, _ in kernels}
    pmc = {counter: database.add("rocpd_info_pmc", name=counter) for counter in counters}
    for number, (name, start, end) in enumerate(dispatches(kernels), 1):
        event = database.kernel(symbols[name], start, end, number)
        for counter in counters:
            database.add("rocpd_pmc_event", event_id=event, pmc_id=pmc[counter],
                         value=counter_value(counter))
    for _ in range(copies):
        database.add("rocpd_memory_copy", start=10, end=1010, dst_agent_id=4,
                     event_id=database.event("MEMORY_COPY"))
    for _, thread, number, start in api_calls(kernels) if calls else ():
        database.region("HIP_RUNTIME_API_EXT", "hipLaunchKernel", thread, start, start + 2, number)
    for span in api_ranges(kernels) if markers else ():
        database.marker(*span)
    database.close()


def api_calls(kernels):
    """(function, thread, number, start) of HIP calls, one for each dispatch."""
    count = sum(calls for _, calls, _ in kernels)
    return [("hipLaunchKernel", 7 if 10 * place < 5 * count else 8, place, 10 * place)
            for place in range(1, count + 1)]


def api_ranges(kernels):
    """(name, thread, start, end): the first half of the calls is in forward's, the rest in backward's."""
    count = sum(calls for _, calls, _ in kernels)
    return [("forward", 7, 0, 10 * count), ("pair_transition", 7, 5, 5 * count),
            ("pair_transition.backward", 8, 5 * count, 11 * count)]


def write_api_traces(prefix, kernels=KERNELS, markers=True):
    import csv
    header = ["Domain", "Function", "Process_Id", "Thread_Id", "Correlation_Id", "Start_Timestamp",
              "End_Timestamp"]
    with open(f"{prefix}_hip_api_trace.csv", "w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC)
        writer.writerow(header)
        for function, thread, number, start in api_calls(kernels):
            writer.writerow(["HIP_RUNTIME_API", function, 1, thread, number, start, start + 2])
    if markers:
        with open(f"{prefix}_marker_api_trace.csv", "w", newline="") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC)
            writer.writerow(header)
            for place, (name, thread, start, end) in enumerate(api_ranges(kernels)):
                writer.writerow(["MARKER_CORE_API", name, 1, thread, 100_000 + place, start, end])


def write_counters(path, counters, kernels=KERNELS):
    """*_counter_collection.csv: a row for each dispatch and counter."""
    import csv
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC)
        writer.writerow(["Correlation_Id", "Dispatch_Id", "Agent_Id", "Kernel_Name", "Counter_Name",
                         "Counter_Value", "Start_Timestamp", "End_Timestamp"])
        for place, (name, start, end) in enumerate(dispatches(kernels), 1):
            writer.writerows([place, place, "Agent 4", name, counter, counter_value(counter), start, end]
                             for counter in counters)


def counter_value(counter):
    """The same for every dispatch: 32 waves, 40%, 2 KB read and 1 KB written."""
    return {"OccupancyPercent": 40.0, "FETCH_SIZE": 2.0, "WRITE_SIZE": 1.0}.get(counter, 32)


def run_child(argv, **environment):
    """(exit code, pid) of the program. SIGINT reaches the whole group; a profiler outlives it and writes."""
    import subprocess
    signal.signal(signal.SIGINT, lambda number, frame: None)
    child = subprocess.Popen(argv, env={**os.environ, **environment})
    while True:
        try:
            return child.wait(), child.pid
        except KeyboardInterrupt:
            pass


def end_like(code):
    """rocprofv3 execs the program, so the program's fate is its own."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    raise SystemExit(code)
