//! `worker_cpu_affinity`: processors of the event loops.
//! (<https://nginx.org/en/docs/ngx_core_module.html#worker_cpu_affinity>)

/// Value of the directive. Processors are numbers in ascending order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CpuAffinity {
    /// `auto [MASK]`: one processor for each loop, in turn, from the mask or from all that the process may use.
    Auto(Option<Vec<usize>>),
    /// `MASK ...`: one mask for each loop; the last one also for further loops.
    Masks(Vec<Vec<usize>>),
}

impl CpuAffinity {
    /// Processors of the loop of this number; `None` if it may run anywhere. `allowed` are those of the process.
    pub fn processors<'a>(&'a self, worker: usize, allowed: &'a [usize]) -> Option<&'a [usize]> {
        match self {
            CpuAffinity::Auto(mask) => {
                let mask = mask.as_deref().unwrap_or(allowed);
                let index = worker.checked_rem(mask.len())?;
                Some(&mask[index..=index])
            }
            CpuAffinity::Masks(masks) => masks.get(worker).or(masks.last()).map(Vec::as_slice),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_loop_has_its_processors() {
        let allowed = [1, 3, 4];
        let of = |affinity: CpuAffinity| -> Vec<Vec<usize>> {
            (0..4).map(|worker| affinity.processors(worker, &allowed).unwrap_or_default().to_vec()).collect()
        };
        assert_eq!(of(CpuAffinity::Auto(None)), [[1], [3], [4], [1]]);
        assert_eq!(of(CpuAffinity::Auto(Some(vec![0, 2]))), [[0], [2], [0], [2]]);
        assert_eq!(of(CpuAffinity::Auto(Some(vec![]))), [[]; 4] as [[usize; 0]; 4]);
        assert_eq!(of(CpuAffinity::Masks(vec![vec![0, 2], vec![1]])), [vec![0, 2], vec![1], vec![1], vec![1]]);
    }
}
