"""What the stand-ins share: their generation, one set of kernels, and the files that profilers write.

FAKE_ROCM names the generation: 6.3, 7.0, 10.1, or next for what is announced after it; FAKE_FAIL a trap.
"""
import os
import signal

GENERATION = os.environ.get("FAKE_ROCM", "7.0")
FAIL = os.environ.get("FAKE_FAIL", "")
ORDER = ("6.3", "7.0", "10.1", "next")

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
                        "Start_Timestamp", "End_Timestamp", "SQ_WAVES"),
}


def at_least(generation):
    return ORDER.index(GENERATION) >= ORDER.index(generation)


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
                     "KERNEL_DISPATCH", "Dispatch_Id": number, "Agent_Id": "Agent 4", "Duration": end - start}
            writer.writerow([known.get(column, 1) for column in header])


def write_rocpd(path, kernels=KERNELS, dispatch_tables=True):
    """A rocpd database: tables with a guid in their name, and the views over them that readers use."""
    import sqlite3
    connection = sqlite3.connect(path)
    if dispatch_tables:
        connection.executescript("""
            CREATE TABLE rocpd_info_kernel_symbol_abc (id INTEGER, guid TEXT, display_name TEXT);
            CREATE TABLE rocpd_kernel_dispatch_abc (id INTEGER PRIMARY KEY, guid TEXT, kernel_id INTEGER,
                                                    start BIGINT, "end" BIGINT);
            CREATE VIEW rocpd_info_kernel_symbol AS SELECT * FROM rocpd_info_kernel_symbol_abc;
            CREATE VIEW rocpd_kernel_dispatch AS SELECT * FROM rocpd_kernel_dispatch_abc;""")
        numbers = {name: number for number, (name, _, _) in enumerate(kernels, 1)}
        connection.executemany("INSERT INTO rocpd_info_kernel_symbol_abc VALUES (?, 'abc', ?)",
                               [(number, name) for name, number in numbers.items()])
        connection.executemany("INSERT INTO rocpd_kernel_dispatch_abc VALUES (NULL, 'abc', ?, ?, ?)",
                               [(numbers[name], start, end) for name, start, end in dispatches(kernels)])
    else:
        connection.execute("CREATE TABLE top_kernels (name, total_calls, total_duration, average)")
        connection.executemany("INSERT INTO top_kernels VALUES (?, ?, ?, ?)",
                               [(name, calls, calls * time / 1e3, time / 1e3)
                                for name, calls, time in kernels])
    connection.commit()
    connection.close()


def run_child(argv):
    """(exit code, pid) of the program. SIGINT reaches the whole group; a profiler outlives it and writes."""
    import subprocess
    signal.signal(signal.SIGINT, lambda number, frame: None)
    child = subprocess.Popen(argv)
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
