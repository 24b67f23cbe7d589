"""The table of failures: the name of each class, its outcome and its fix. docs/failures.md shows it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from launch.contract.outcomes import OUT_OF_MEMORY_IN_CHECK, OutcomeName
from launch.contract.records.events import Phase


@dataclass(frozen=True)
class FailureClass:
    """One kind of failure. ``pattern`` matches the exceptions ("Type: message") that belong to it."""

    name: str
    outcome: OutcomeName
    fix: str
    pattern: str = ""
    phase: Phase | None = None
    """The only phase in which ``pattern`` counts; None means any phase."""
    infrastructure: bool = False
    """Whether nodes, network or scheduler caused it, so that another attempt may succeed."""
    repeats_alike: bool = False
    """Whether settings or installed software decide it, so that each repeat of the cell fails alike."""
    job_states: tuple[str, ...] = ()
    """The end states of a Slurm job that belong to this class, if the attempt's records do not explain its end."""


# These come from PyTorch's allocator, CUDA through PyTorch and Transformer Engine, NCCL, Triton, and CUDA's libraries for their
# workspaces.
_OUT_OF_MEMORY = (
    r"OutOfMemoryError|CUDA out of memory|CUDA (driver )?[Ee]rror: out of memory|Cuda failure.*out of memory"
    r"|cudaErrorMemoryAllocation|Triton Error \[CUDA\]: out of memory|(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_(\w+_)?ALLOC(ATION)?_FAILED"
)

# The loader's messages about an incomplete shared object. In the caches of Inductor and Triton, the user may delete it.
_TORN = r"(file too short|cannot read file data|invalid ELF header)"

DISK_FULL = FailureClass("DISK_FULL", "ENVIRONMENT", "free space for the sweep's folder (the disk, a quota, ulimit -f), then resume the sweep", r"No space left on device|Disk quota exceeded|\[Errno 27\]", infrastructure=True)  # fmt: skip

# Sorted by priority: the first matching row names the class.
EXCEPTION_CLASSES: tuple[FailureClass, ...] = (
    FailureClass("UNSUPPORTED", "CONFIG", "change the setting that the message names, or use an engine that supports it", r"^UnsupportedError:", repeats_alike=True),
    FailureClass("DATA", "CONFIG", "correct the data section of the recipe as the message says", r"^DataError:", repeats_alike=True),
    FailureClass("CHECKPOINT", "CONFIG", "correct model.weights, or the model section of the recipe, as the message says", r"^CheckpointError:", repeats_alike=True),
    FailureClass("SAFETENSORS", "CONFIG", "a file of model.weights changed after it was checked: make sure that nothing writes there while runs start, or copy it again", r"^SafetensorError:"),
    FailureClass("NUMERIC", "NUMERIC", "look at the eager baseline at the same step: if it is finite, the capture changed the numbers; if not, lower training.learning_rate", r"^NumericError:|found (NaN|Inf) in local|\b[Ll]oss is (nan|NaN|inf)\b"),
    FailureClass(OUT_OF_MEMORY_IN_CHECK, "CUDA_OOM", "a step check needs more memory than training, since it runs an eager step in addition to the graphs: the run begins again by itself without checks; to save this time, set step_checks: 0", r"OutOfMemoryError: in the check of step"),
    FailureClass("OOM_CAPTURE", "CUDA_OOM", "graphs need memory in addition to that of the eager step: capture fewer modules, lower training.micro_batch_size or sequence_length, or raise parallelism.pp or tp", _OUT_OF_MEMORY, phase="capture"),
    FailureClass("CUDA_OOM", "CUDA_OOM", "lower training.micro_batch_size or sequence_length, or raise parallelism.pp or tp; where the eager baseline fits, capture fewer modules", _OUT_OF_MEMORY),
    FailureClass("HOST_OOM", "HOST_OOM", "give the job more host memory (data workers also share it in /dev/shm), or run fewer ranks per node", r"^(_Array)?MemoryError|\[Errno 12\]|Cannot allocate memory \(12\)|DefaultCPUAllocator: (can't allocate|not enough) memory|DataLoader worker .* is killed by signal: (Killed|Bus error)"),
    FailureClass("COMPILE_CACHE", "ENVIRONMENT", "a killed compilation left the named file incomplete: delete it, or the folder that TORCHINDUCTOR_CACHE_DIR names, and run again", rf"/((\w\w)/c\2\w*(\.\w+)*|[A-Z2-7]{{52}}/[^/ ]+)\.so: {_TORN}"),
    FailureClass("COMPILER", "ENVIRONMENT", "install a C++ compiler and Python's headers (Debian: apt-get install g++ python3-dev)", r"InvalidCxxCompiler|No working C\+\+ compiler|Failed to find C compiler|Python\.h: No such file", repeats_alike=True),
    FailureClass("ATTENTION_BACKEND", "ENVIRONMENT", "no installed kernel supports this attention, with or without graphs: find out why with environment.NVTE_DEBUG=1 and NVTE_DEBUG_LEVEL=2, and name no training.attention_backend; packed sequences with attention sinks (GPT-OSS) need Transformer Engine 2.12 and cuDNN 9.18, or data.packed_sequences=false", r"No (dot product|fused) attention (backend|support)|unset NVTE_FLASH_ATTN|Available backends = \{FlashAttention=False, FusedAttention=False, Unfused\w+=False|No available kernel\. Aborting execution", repeats_alike=True),
    FailureClass("APEX", "ENVIRONMENT", "Megatron's fusion of gradient accumulation needs APEX on the host: install APEX with its C++ and CUDA extensions, or turn the fusion off with --no-gradient-accumulation-fusion (Megatron Bridge: model.gradient_accumulation_fusion=false)", r"fused_weight_gradient_mlp_cuda module is not found|No module named 'fused_weight_gradient_mlp_cuda'", repeats_alike=True),
    FailureClass("IMPORT", "ENVIRONMENT", "install the package that the message names into the environment that runs the job", rf"^(ModuleNotFoundError|ImportError):|undefined symbol|^OSError:.*(cannot open shared object file|{_TORN})", repeats_alike=True),
    FailureClass("NO_PROGRAM", "ENVIRONMENT", "correct command.run or command.workdir, and make sure that each node sees the program", r"can't open file '|command\.run cannot start|^: .*: (command )?not found$|^: (\S*/)?(ba)?sh: .*: No such file or directory$|^: (\S*/)?python[\d.]*: (No module named|Error while finding module specification for) ", repeats_alike=True),
    FailureClass("NO_GPU", "ENVIRONMENT", "install a PyTorch with CUDA that fits the host's driver in the environment that runs the job; without graphs, resources.device=cpu needs no GPU", r"the program trains without a GPU|Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available|NCCL is only supported with GPUs, no GPUs found|NVIDIA driver on your system is too old|driver version is insufficient for CUDA runtime|unsupported display driver|no kernel image is available", repeats_alike=True),
    FailureClass("GPU_SHARED", "ENVIRONMENT", "end the other processes on that GPU, which nvidia-smi lists, or use another GPU; then resume", r"^EnvironmentFault: other processes held", infrastructure=True),
    FailureClass("ENVIRONMENT", "ENVIRONMENT", "install on the host what the message names", r"^EnvironmentFault:"),
    DISK_FULL,
    FailureClass("DOWNLOAD", "ENVIRONMENT", "a server that the program asked did not answer: download models and data where there is a network, and let the program read them from a folder (Hugging Face: HF_HUB_OFFLINE=1)", r"HTTPS?Connection(Pool)?\(|couldn't connect to '?https?://|^LocalEntryNotFoundError:"),
    FailureClass("GPU_FAULT", "ENVIRONMENT", "a GPU of the named node is broken, or another process uses it: ask the site to check the node", r"uncorrectable (ECC|NVLink) error|system not yet initialized|CUDA-capable device\(s\) is/are busy or unavailable|GPU has fallen off the bus", infrastructure=True),
    # Settings that Megatron-Core, Megatron-LM and Megatron Bridge reject when a user's program starts.
    FailureClass("TRANSFORMER_ENGINE", "ENVIRONMENT", "install the release of Transformer Engine that the message names, or turn off what needs it", r"not supported without TE\b|requires TransformerEngine, but|requires? (TransformerEngine|TE)( version)? ?>=|supported with TE ?>=|TE (with )?version ?>=|[Pp]lease install TE\b|te_general_gemm", repeats_alike=True),
    FailureClass("GRAPH_REGISTER", "CONFIG", "set environment.NCCL_GRAPH_REGISTER=0, or take expandable_segments:True out of PYTORCH_CUDA_ALLOC_CONF", r"Setting NCCL_GRAPH_REGISTER=0", repeats_alike=True),
    FailureClass("GRAPH_NAN_CHECK", "CONFIG", "a captured step cannot read its loss: pass --no-check-for-nan-in-loss-and-grad (Megatron Bridge: rerun_state_machine.check_for_nan_in_loss=false and ddp.check_for_nan_in_grad=false)", r"check_for_nan_in_loss must be disabled|no-check-for-nan-in-loss-and-grad should be set", repeats_alike=True),
    FailureClass("GRAPH_RNG", "CONFIG", "random numbers in a graph need Transformer Engine's RNG tracker: pass --te-rng-tracker (Megatron Bridge: rng.te_rng_tracker=true)", r"RNG tracker (does not support|is required for) cudagraphs|cudagraphs with RNG", repeats_alike=True),
    FailureClass("GRAPH_RECOMPUTE", "CONFIG", "recomputation would cross the edge of a graph: recompute only modules outside the scope, or use full_iteration", r"full recompute is only supported with full iteration|moe recompute is not supported with moe_router|(dropout|moe_input_jitter_eps) is not supported with graphed", repeats_alike=True),
    FailureClass("GRAPH_OFFLOAD", "CONFIG", "turn off the offloading that the message names, or capture fewer parts", r"CUDA graphs not supported with CPU offloading|Offloading modules captured in cuda graph|Cudagraphs not supported|fine-grained activation offloading with cuda_graph_impl|(moe_paged_stash|[Oo]ffload).*(cpu_offloading|CUDA graph)", repeats_alike=True),
    FailureClass("GRAPH_OVERLAP", "CONFIG", "take moe and mlp out of the scope, do not use local graphs, or turn off overlap_moe_expert_parallel_comm and delay_wgrad_compute", r"overlap_moe_expert_parallel_comm|delay_wgrad_compute|(EP|ep) overlap (must be|only supports)|for ep overlap", repeats_alike=True),
    FailureClass("GRAPH_PACKED", "CONFIG", "a graph of packed sequences needs fixed shapes, and transformer_engine's graphs take no packed attention: leave attn out of cuda_graph.scope, or capture the whole step with padded cu_seqlens (data.max_documents; Megatron Bridge: pad_to_max_length=true and offline_packing_specs.pad_cu_seqlens=true, but 0.6.2 cannot capture a whole step of packed sequences), with a micro-batch of 1, or do not pack", r"packed_seq_params are excluded|pad_cu_seqlens|Offline packing with CUDA graphs|Micro batch size should be 1 when training with packed", repeats_alike=True),
    FailureClass("GRAPH_SETTINGS", "CONFIG", "this release does not know the graph settings that the message names, or rejects their combination: docs/rules.md lists what goes together, and docs/megatron.md the names in each release", r"cuda[-_]graph[-_](scope|impl|modules|(num[-_])?warmup[-_]steps)|(enable|external)[-_]cuda[-_]graph|(moe|mlp|moe_preprocess) cuda graph is (only|not) supported|full scope cannot be used|Invalid (inference )?(cuda|CUDA) graph|full.iteration (cuda|CUDA) graph|there should be only one model chunk|moe_paged_stash|GTP \+ local CUDA graphs|moe_pad_expert_input_to_capacity|Partial cudagraphs for MoEs|with CUDA graph requires fixed|(supported|incompatible) with CUDA Graphs?$|CUDA_GRAPHS_USE_NODE_PRIORITY|assert not self\.is_moe_layer", repeats_alike=True),
    FailureClass("OPTIONS", "CONFIG", "the program does not know an option of its command, or misses one: correct command.run, or the flags of the cell; plan prints the whole command", r"^\S*: error: (unrecognized arguments|the following arguments are required|ambiguous option)|^Error: (No such|Missing) option|^ValueError: Some specified arguments are not used by the HfArgumentParser", phase="init", repeats_alike=True),
    FailureClass("OPTION_VALUE", "CONFIG", "the program rejects a value in its command: correct command.run, or the setting whose placeholder it has; plan prints the whole command", r"^py: error: |^\S*: error: argument |^Error: Invalid value|^: Pass --help(short|full)|^: Set the environment variable HYDRA_FULL_ERROR=1", phase="init", repeats_alike=True),
    FailureClass("COMPILE", "FAILED", "see the exception in the message, or compile nothing: training.compile=none, and another cuda_graph.impl than torch_compile", r"^CompileError:"),
    FailureClass("REPLAY", "FAILED", "a graph replays fixed shapes: pad the named input to one shape, and keep its dtype and device", r"^ReplayError:"),
    FailureClass("GRAPH_ARGUMENTS", "FAILED", "a layer was replayed with different arguments than it was captured with: keep the number and shapes of sequences and micro-batches the same in every step, set data.packed_sequences=false, or leave attention out of cuda_graph.scope", r"CUDA graph argument mismatch|no matching cudagraph|different number of tensors than what it was graphed with|CUDA graph accepts only Tensor inputs|Keyword Arguments not supported with CUDA graph|auxiliary input structure must remain constant|[Cc]udagraphs rec(ei|ie)ved an arg|unsupported in cudagraph|valid_cudagraph_attrs mismatch"),
    FailureClass("GRAPH_BATCH", "FAILED", "full_iteration copies each batch into static tensors: have the data iterator return a dict of tensors of one shape, and pass arguments by name", r"Unsupported copy for tuple|Expect top-level as container type|does not accept positional args"),
    FailureClass("GRAPH_ORDER", "FAILED", "layers were replayed in a different order than they were captured: do not run them again between a forward pass and its backward pass", r"Tried (calling|replaying) (the )?(fwd|bwd) cudagraph|num_(microbatches|model_chunks) must match|order dimension mismatch|doesn't match number of dgrad|requested to create a graph after|CUDA Graphs (have (already|not)|should have) been created|CUDA Graphs were (already )?created|were already created|capture (has already|should have) been finished"),
    FailureClass("GRAPH_UPDATE", "FAILED", "the graph cannot be updated with the changed work: capture it again, or keep shapes and kernels the same", r"cudaErrorGraphExecUpdateFailure|graph update was not performed"),
    FailureClass("GRAPH_OVERWRITTEN", "FAILED", "a replay overwrote an earlier output that is still read: use one micro-batch per step, or full_iteration", r"tensor output of CUDAGraphs that has been overwritten"),
    FailureClass("HOOKS", "CAPTURE_FAILED", "a captured module has hooks, which a replay does not call: turn off parallelism.overlap_param_gather if it is on, else remove the hooks or capture the modules without them", r"[Mm]odules must not have hooks|user registered pre-forward hooks"),
    FailureClass("RNG_CAPTURE", "CAPTURE_FAILED", "captured code uses a random generator that its graph does not know, or reads a generator's state: call the graph's register_generator_state before the capture, and checkpoint with preserve_rng_state=False", r"CUDAGeneratorImpl|CUDA generator|Offset increment outside graph capture"),
    FailureClass("ALLOC_CAPTURE", "CAPTURE_FAILED", "memory outside the graph's pool was allocated or freed during a capture: allocate it in the warm-up, and capture nothing after a capture that failed", r"captures_underway|beginAllocateToPool|use_count > 0 INTERNAL ASSERT FAILED"),
    FailureClass("SYNC_IN_CAPTURE", "CAPTURE_FAILED", "captured code waits for the device: look for .item(), .cpu(), a printed tensor or a copy from unpinned memory, or capture a smaller scope; in a whole step Megatron Bridge 0.6.2 does this for packed sequences: capture mlp alone, or do not pack", r"cudaErrorStreamCaptureUnsupported|operation not permitted when stream is capturing|Cannot copy between CPU and CUDA tensors during CUDA graph capture|cudaErrorCapturedEvent|event last recorded in a capturing stream"),
    FailureClass("CAPTURE_INVALID", "CAPTURE_FAILED", "something broke the capture before this operation: look in the rank's log for an earlier error, and for a thread that synchronizes or queries the stream (pinned memory, logging)", r"cudaErrorStreamCaptureInvalidated|previous error during capture|StreamCaptureStatusInvalidated"),
    FailureClass("CAPTURE_MERGE", "CAPTURE_FAILED", "two captures depend on each other, or a capture ended on a different stream than it began on: capture one after the other", r"cudaErrorStreamCapture(Merge|Unmatched)|merge of separate capture sequences|not ended in the same stream"),
    FailureClass("UNJOINED", "CAPTURE_FAILED", "a side stream was forked in the capture and never joined: have the capturing stream wait for it (wait_stream) before the capture ends", r"cudaErrorStreamCaptureUnjoined|capturing stream has unjoined work"),
    FailureClass("ISOLATION", "CAPTURE_FAILED", "captured code waits for work that began before the capture: wait for that work before the capture begins", r"cudaErrorStreamCaptureIsolation|dependency created on uncaptured work"),
    FailureClass("IMPLICIT", "CAPTURE_FAILED", "the default stream would wait for captured work: a parameter's gradient is accumulated on the stream that first used it, as long as any loss or output computed from it is alive; delete losses and outputs of earlier steps before the capture, and warm up on a side stream", r"cudaErrorStreamCaptureImplicit|would make the legacy stream depend on a capturing"),
    FailureClass("WRONG_THREAD", "CAPTURE_FAILED", "end the capture in the thread that began it", r"cudaErrorStreamCaptureWrongThread|thread-local capture sequence from another thread"),
    FailureClass("RANKS", "CONFIG", "let the program start as many ranks as the run has, or set parallelism and resources to its number (wrap: --ranks)", r"ProgramError: the program trains with \d+ rank", repeats_alike=True),
    FailureClass("NOT_SHOWN", "CONFIG", "let the program show the loss of each step as the message says", r"^ProgramError: the program (shows|prints) ", repeats_alike=True),
    FailureClass("ENDED_EARLY", "CONFIG", "read in its log why it ended; if it took all steps that it was asked for, pass it the number in the message", r"^ProgramError: the program ended after"),
    FailureClass("OBSERVED", "CONFIG", "change the program or its arguments as the message says", r"^ProgramError:"),
    FailureClass("CAPTURE", "CAPTURE_FAILED", "see the exception in the message; where the implementation has scopes, a smaller one narrows down the cause", r"^CaptureError:"),
    FailureClass("ILLEGAL_ACCESS", "FAILED", "a stale pointer: look for an input that was freed before the replay; with expandable segments set NCCL_GRAPH_REGISTER=0", r"illegal memory access|cudaErrorIllegalAddress"),
    FailureClass("KERNEL", "FAILED", "a kernel failed on the device, and the error may name a later call: run it again with environment.CUDA_LAUNCH_BLOCKING=1 and cuda_graph.impl=none", r"unspecified launch failure|cudaErrorLaunchFailure|device-side assert triggered|cudaErrorAssert|misaligned address|an illegal instruction was encountered"),
    FailureClass("COMMUNICATOR_SETUP", "ENVIRONMENT", "ranks did not reach each other: if this happens on other nodes too, check their network, and NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME in the cluster's profile", r"^Dist(Network|Store)Error:|EADDRINUSE|[Aa]ddress already in use|[Cc]onnect(ion)? (timed out|timeout|refused)|connectFullMesh failed|ncclCommInitRank|unhandled system error|remote process exited", phase="init", infrastructure=True),
    FailureClass("COMMUNICATION", "FAILED", "see the log of the rank that failed first", r"^Dist\w+Error:|^(?!(Key|Attribute|Name|Type|Index)Error:)(?s:.*)(Gloo|gloo|NCCL|nccl\w+Error|ProcessGroup|collective)|Connection (closed|reset) by peer|Connection was likely closed"),
)  # fmt: skip

# Ends without an exception that explains them.
CANCELLED = FailureClass("CANCELLED", "CANCELLED", "resume the sweep to run it again", job_states=("CANCELLED", "REVOKED"))  # fmt: skip
TIMEOUT = FailureClass("TIMEOUT", "TIMEOUT", "raise resources.minutes_per_run, or lower training.steps")
HANG = FailureClass("HANG", "HANG", "the logs hold every rank's stack at that moment; raise resources.hang_minutes if a step, or loading and compiling before the first one, may be silent for that long")  # fmt: skip
TEARDOWN_HANG = FailureClass(
    "TEARDOWN_HANG",
    "TEARDOWN_HANG",
    "the results are valid; delete graphs before process groups so that the program ends",
)
TEARDOWN_CRASH = FailureClass("TEARDOWN_CRASH", "FAILED", "see the logs; every step's metrics are recorded")
SPEC = FailureClass(
    "SPEC", "CONFIG", "delete the run's spec.json, then resume the sweep with --failed, which writes a new one"
)
KERNEL_OOM = FailureClass("KERNEL_OOM", "HOST_OOM", "give the job more host memory, or run fewer ranks per node")
EXIT = FailureClass("EXIT", "FAILED", "see logs/launcher.log and the ranks' logs")
PROGRAM = FailureClass("PROGRAM", "FAILED", "its rank's log has its output; if the program did train, it has no torch.optim optimizer: call launch.observe.step(loss=..., grad_norm=...) at the end of each step; or its Python did not load the observer: start it as python -m launch.observe PROGRAM, with the checkout on PYTHONPATH")  # fmt: skip
SIGNALS: tuple[FailureClass, ...] = (
    FailureClass("SIGKILL", "FAILED", "a user killed it, or the kernel did because memory ran out: give the job more host memory, or ask who killed it"),
    FailureClass("SIGSEGV", "FAILED", "an error in native code: the rank's log holds the Python stack"),
    FailureClass("SIGBUS", "FAILED", "a memory-mapped file was shortened while it was read, or its disk is faulty: check data.path and model.weights"),
    FailureClass("SIGILL", "FAILED", "a library used an instruction that this processor rejects, as on virtual machines that announce AMX: set environment.ONEDNN_MAX_CPU_ISA to AVX512_CORE_BF16 in the recipe"),
    FailureClass("SIGNAL", "FAILED", "the signal that the class names ended it: the rank's log may hold the Python stack"),
)  # fmt: skip

# Ends of an attempt's Slurm job or step.
LAUNCH = FailureClass("LAUNCH", "ENVIRONMENT", "no rank started: see logs/launcher.log, or the job's own log under submitit/, for what srun, the container or the interpreter printed", infrastructure=True)  # fmt: skip
NODE_FAIL = FailureClass("NODE_FAIL", "NODE_FAIL", "ask the site to check the node; resume the sweep to run it again on others", infrastructure=True, job_states=("BOOT_FAIL", "LAUNCH_FAILED", "NODE_FAIL", "RECONFIG_FAIL"))  # fmt: skip
PREEMPTED = FailureClass("PREEMPTED", "PREEMPTED", "resume the sweep to run it again", infrastructure=True, job_states=("PREEMPTED",))  # fmt: skip
REQUEUED = FailureClass("REQUEUED", "PREEMPTED", "resume the sweep to run it again", infrastructure=True, job_states=("REQUEUED",))  # fmt: skip
STEP_MEMORY = FailureClass("STEP_MEMORY", "HOST_OOM", "raise mem in the cluster's profile, or run fewer ranks per node", job_states=("OUT_OF_MEMORY",))  # fmt: skip
JOB_TIMEOUT = FailureClass("JOB_TIMEOUT", "TIMEOUT", "the job reached its time limit, which is computed from resources.minutes_per_run: raise that", job_states=("DEADLINE", "TIMEOUT"))  # fmt: skip
SUPERVISOR = FailureClass("SUPERVISOR", "FAILED", "the job's own log under submitit/ may show why its supervisor died; resume the sweep with --failed to run it again", job_states=("COMPLETED", "FAILED"))  # fmt: skip
JOB_GONE = FailureClass("JOB_GONE", "ENVIRONMENT", "ask the site what became of the job; resume the sweep to run it again", infrastructure=True, job_states=("GONE",))  # fmt: skip

FAILURE_CLASSES: tuple[FailureClass, ...] = (
    *EXCEPTION_CLASSES, CANCELLED, TIMEOUT, HANG, TEARDOWN_HANG, TEARDOWN_CRASH, SPEC, KERNEL_OOM, EXIT, PROGRAM, *SIGNALS,
    LAUNCH, NODE_FAIL, PREEMPTED, REQUEUED, STEP_MEMORY, JOB_TIMEOUT, SUPERVISOR, JOB_GONE,
)  # fmt: skip
"""Every class that a record may name. An exception without a matching row has its type as its class."""

CLASS_OF_JOB_STATE = {state: row for row in FAILURE_CLASSES for state in row.job_states}

# What a rank says of another rank that is gone, and what CUDA says of a capture that an earlier error had broken.
_CONSEQUENCE = re.compile(
    r"Connection (closed|reset) by peer|Connection was likely closed|[Bb]roken pipe|Software caused connection abort"
    r"|Dist(Backend|Network|Store)Error|ncclRemoteError|remote process exited|communicator was aborted|Socket Timeout"
    r"|Watchdog caught collective|cudaErrorStreamCaptureInvalidated|previous error during capture|SIGTERM|got signal: 15"
)


def is_consequence(type_name: str, message: str, phase: Phase) -> bool:
    """Return whether an exception follows from another one. It is then a cause only if nothing else is known.

    A message may name the cause besides, as NCCL's does if its memory ran out.
    """
    row = classify(type_name, message, phase)
    if row is not None and row.name not in ("CAPTURE_INVALID", "COMMUNICATION"):
        return row.name == "COMMUNICATOR_SETUP"
    return _CONSEQUENCE.search(f"{type_name}: {message}") is not None


def classify(type_name: str, message: str, phase: Phase) -> FailureClass | None:
    """Return the first row that matches an exception in ``phase``, or None."""
    text = f"{type_name}: {message}"
    rows = (row for row in EXCEPTION_CLASSES if row.phase in (None, phase))
    return next((row for row in rows if re.search(row.pattern, text)), None)
