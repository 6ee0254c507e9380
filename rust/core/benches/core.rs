//! Times of the core's operations: `cargo bench --bench core`.

mod work;

use std::time::Duration;

use criterion::{BatchSize, BenchmarkId, Criterion};

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(30)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args();
    for (name, setup) in work::OPERATIONS {
        let mut run = setup();
        criterion.bench_function(name, |bencher| bencher.iter(&mut run));
    }
    sized(&mut criterion, "cycle by blocks", &[64, 256, 1296, 4096, 16384], work::cycle);
    sized(&mut criterion, "tracker by adds", &[8, 64], work::tracker);
    rebuilds(&mut criterion);
    criterion.final_summary();
}

fn sized(criterion: &mut Criterion, name: &str, sizes: &[u64], setup: fn(u64) -> work::Operation) {
    let mut group = criterion.benchmark_group(name);
    for &size in sizes {
        let mut run = setup(size);
        group.bench_function(BenchmarkId::from_parameter(size), |bencher| bencher.iter(&mut run));
    }
    group.finish();
}

fn rebuilds(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("rebuild by entries");
    group.sample_size(10);
    for entries in [10_000, 100_000] {
        let mut run = work::rebuild(entries);
        group.bench_function(BenchmarkId::from_parameter(entries), |bencher| {
            bencher.iter_batched(|| (), |()| run(), BatchSize::PerIteration);
        });
    }
    group.finish();
}
