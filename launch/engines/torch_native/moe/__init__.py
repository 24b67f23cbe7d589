"""Mixture of experts: router, dispatch, grouped GEMM."""
