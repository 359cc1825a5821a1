"""The one classifier of kernels and operations: what profilers call them, names separated by ";"."""
import subprocess
import sys

import pytest

from fusion_lab.measuring import kinds
from tests.support import ROOT

KERNELS = {
    "matrix product": """
        Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT64x64x64; Custom_Cijk_Alik_Bljk_HHS;
        Cijk_SB_BetaOnly; void rocblas_gemvt_kernel<false, 256>;
        _ZN2ck16tensor_operation6device22kernel_gemm_xdl_cshuffleE; triton_tem_fused_addmm_4; triton_mm;
        ampere_sgemm_128x64_nn; sm90_xmma_gemm_bf16; nvjet_hsh_128x256_64x4_2x1_v;
        void cublasLt::splitKreduce_kernel<32, 16>; miopenSp3AsmConv_v30_3_1; igemm_fwd_gtcx3_nhwc_fp16""",
    "attention": """
        attn_fwd; attn_fwd.kd; _attn_fwd; bwd_kernel_dk_dv; bwd_kernel_dk_dv.kd; bwd_kernel_dq;
        bwd_kernel_fuse; bwd_preprocess; triton_tem_fused_flex_attention_backward_2;
        triton_flex_attention; void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<32> >;
        fmha_cutlassF_f32_aligned; fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention);
        ck_tile::FmhaFwdKernel""",
    "softmax": """
        (anonymous namespace)::softmax_warp_forward<float>; void at::native::softmax_warp_forward;
        void at::native::cunn_SoftMaxForward<4>;
        void at::native::(anonymous namespace)::cunn_SoftMaxBackward<4, float, float>;
        void at::native::(anonymous namespace)::softmax_warp_backward<float, float, float, 6>;
        triton_red_fused__softmax_2; triton_per_fused__softmax_backward_data_5""",
    "normalisation": """
        void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>;
        vectorized_layer_norm_kernel;
        void at::native::(anonymous namespace)::layer_norm_grad_input_kernel<float>;
        GammaBetaBackwardCUDAKernelTemplate; triton_per_fused_native_layer_norm_backward_8;
        MIOpenBatchNormFwdTrainSpatial""",
    "elementwise": """
        void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float> >;
        vectorized_elementwise_kernel<4, sigmoid>;
        void at::native::elementwise_kernel_manual_unroll<128, 4, sigmoid_kernel_cuda>;
        triton_poi_fused_mul_3; triton_poi_fused__scaled_dot_product_flash_attention_clone_3;
        triton_poi_fused_native_layer_norm_1; triton_for_fused_0;
        void at::native::(anonymous namespace)::indexSelectLargeIndex<float>;
        void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float>""",
    "optimizer": """
        void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>;
        multi_tensor_apply_kernel<AdamW>""",
    "reduction": """
        void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >;
        reduce_kernel<NormTwoOps<float> >; triton_red_fused_sum_3; triton_red_fused_sum;
        triton_per_fused_mul_sum_5; triton_per_fused_linalg_vector_norm_7;
        void rocprim::ROCPRIM_300_NS::detail::trampoline_kernel<>; void cub::DeviceScanKernel<>;
        multi_tensor_apply_kernel<LpNormFunctor<float, 2> >; nll_loss_forward_reduce_cuda_kernel_2d""",
    "copy": """
        __amd_rocclr_copyBuffer.kd; CatArrayBatchedCopy_aligned16_contig;
        elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>;
        multi_tensor_apply_kernel<CopyFunctor<float, 2, 1, 1>, Copy<float, float> >;
        batched_transpose_32x32_dword; Memcpy DtoD; Memcpy DtoH (Device -> Pinned)""",
    "fill": """
        __amd_rocclr_fillBufferAligned.kd;
        vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >; Memset (Device)""",
    "communication": """
        ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>);
        ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>);
        rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)""",
    "compiled code": "triton_unk_fused_3",
    "other": "my_kernel",
}
OPERATIONS = {
    "view": "aten::view; aten::resolve_conj; aten::split_with_sizes; detach",
    "autograd's own": """
        torch::autograd::AccumulateGrad; autograd::engine::evaluate_function: SoftmaxBackward0;
        SoftmaxBackward0; TriangleProductBackward; BackwardHookFunction; BackwardHookFunctionBackward""",
    "compiled code": "CompiledFunctionBackward; CompiledFunction; Torch-Compiled Region: 0/0",
    "attention": """
        aten::scaled_dot_product_attention; aten::_scaled_dot_product_flash_attention_for_cpu_backward""",
    "softmax": "aten::_softmax; aten::_softmax_backward_data; aten::_log_softmax_backward_data",
    "normalisation": "aten::native_layer_norm; aten::native_layer_norm_backward",
    "matrix product": """
        aten::mm; aten::bmm; aten::addmm; aten::addmv_; aten::_addmm_activation;
        mkldnn::_linear_pointwise""",
    "elementwise": """
        aten::mul_; aten::masked_fill; aten::threshold_backward; aten::sigmoid_backward;
        aten::index_select; aten::embedding""",
    "reduction": """
        aten::sum; aten::mean; aten::linalg_vector_norm; aten::_foreach_norm; aten::nll_loss_forward;
        aten::embedding_dense_backward""",
    "optimizer": "aten::_fused_adamw_; aten::_foreach_mul_",
    "copy": "aten::copy_; aten::cat; aten::_to_copy; aten::clone",
    "fill": "aten::fill_; aten::zero_; aten::empty_strided",
    "communication": "c10d::allreduce_; _c10d_functional::all_gather_into_tensor",
    "other": "aten::item; aten::_local_scalar_dense",
}


@pytest.mark.parametrize("kind_of,expected", [
    (kinds.kind_of_kernel, KERNELS), (kinds.kind_of_operation, OPERATIONS)])
def test_kinds(kind_of, expected):
    names = {name.strip(): kind for kind, words in expected.items() for name in words.split(";")}
    assert {name: kind_of(name) for name in names} == names


def test_one_vocabulary():
    """Every word of the tables is in the list, every word of the list in a test, and no kernel is a view."""
    assert {kind for kind, _ in kinds.OF_KERNELS} | {"other"} == set(kinds.KINDS) == set(KERNELS)
    found = {kind for kind, _ in kinds.OF_OPERATIONS} | {"other"}
    assert found == set(kinds.OPERATION_KINDS) == set(OPERATIONS)


def test_needs_the_standard_library_only():
    code = ("import sys; sys.modules['torch'] = sys.modules['numpy'] = None; "
            "import fusion_lab.measuring.kinds")
    assert subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT).returncode == 0
