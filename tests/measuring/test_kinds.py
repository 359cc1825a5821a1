"""The one classifier of kernels: what profilers call them, names separated by ";"."""
from fusion_lab.measuring import kinds

KERNELS = {
    "matrix product": """
        Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT64x64x64; void rocblas_gemvt_kernel<false, 256>;
        _ZN2ck16tensor_operation6device22kernel_gemm_xdl_cshuffleE; triton_tem_fused_addmm_4; triton_mm;
        ampere_sgemm_128x64_nn; sm90_xmma_gemm_bf16; nvjet_hsh_128x256_64x4_2x1_v;
        void cublasLt::splitKreduce_kernel<32, 16>; miopenSp3AsmConv_v30_3_1""",
    "attention": """
        attn_fwd.kd; bwd_kernel_dk_dv; bwd_kernel_dq; bwd_kernel_fuse; bwd_preprocess; triton_flex_attention;
        triton_tem_fused_flex_attention_backward_2; ck_tile::FmhaFwdKernel;
        void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<32> >; fmha_cutlassF_f32_aligned""",
    "softmax": """
        void at::native::softmax_warp_forward; void at::native::cunn_SoftMaxForward<4>;
        triton_red_fused__softmax_2; triton_per_fused__softmax_backward_data_5""",
    "normalisation": """
        void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>;
        GammaBetaBackwardCUDAKernelTemplate; triton_per_fused_native_layer_norm_backward_8;
        MIOpenBatchNormFwdTrainSpatial""",
    "elementwise": """
        void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float> >;
        triton_poi_fused__scaled_dot_product_flash_attention_clone_3; triton_poi_fused_native_layer_norm_1;
        triton_for_fused_0; void at::native::(anonymous namespace)::indexSelectLargeIndex<float>;
        void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float>""",
    "optimizer": "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>",
    "reduction": """
        void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >; triton_red_fused_sum_3;
        triton_per_fused_linalg_vector_norm_7; void cub::DeviceScanKernel<>;
        void rocprim::ROCPRIM_300_NS::detail::trampoline_kernel<>;
        multi_tensor_apply_kernel<LpNormFunctor<float, 2> >; nll_loss_forward_reduce_cuda_kernel_2d""",
    "copy": """
        __amd_rocclr_copyBuffer.kd; CatArrayBatchedCopy_aligned16_contig; batched_transpose_32x32_dword;
        elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>; Memcpy DtoH (Device -> Pinned);
        multi_tensor_apply_kernel<CopyFunctor<float, 2, 1, 1>, Copy<float, float> >""",
    "fill": """
        __amd_rocclr_fillBufferAligned.kd; Memset (Device);
        vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >""",
    "communication": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(); rcclGenericKernel<1, false>",
    "compiled code": "triton_unk_fused_3",
    "other": "my_kernel",
}


def test_kinds():
    """Every word is in the list, and every word of the list has names here."""
    names = {name.strip(): kind for kind, words in KERNELS.items() for name in words.split(";")}
    assert {name: kinds.kind_of_kernel(name) for name in names} == names
    assert {kind for kind, _ in kinds.OF_KERNELS} | {"other"} == set(kinds.KINDS) == set(KERNELS)
