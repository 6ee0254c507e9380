//! Every operation of an index once, whatever the index contains.

use ecpool_core::dtype;
use ecpool_core::index::{ClientRef, Expected, Index, NamespaceKey, Registration, Role, SaveRequest, SaveShape};

const KEYS: u64 = 6;

fn registration() -> Registration<'static> {
    Registration {
        role: Role::Pool,
        rank: 0,
        group: 1,
        label: "fuzz",
        byte: 0,
        byte_generation: 0,
        pid: 1,
        attached_at_unix: 0,
    }
}

fn digest(key: u64) -> [u64; 4] {
    [key * 0x1234_5678_9abc, key, 7, 7]
}

/// Calls everything; errors are fine, panics and endless loops are not.
pub(crate) fn poke(index: &mut Index<'_>, ids: &[u64]) {
    let owner = index.register_client(&registration()).ok().flatten().unwrap_or_default();
    let found = index.resolve_namespace(&[1, 2, 3, 4], "fuzz").ok().flatten();
    let namespace = found.and_then(|found| index.namespace(found)).unwrap_or(NamespaceKey { row: 0, epoch: 0 });
    for key in 0..KEYS {
        poke_key(index, &namespace, owner, key);
    }
    for id in ids.iter().copied().chain((0..8).map(|n| (1 << 32) | n)) {
        poke_transfer(index, id);
    }
    let _ = index.sweep_flushed(namespace.row, 0, u32::MAX);
    let _ = index.reclaim(10, 5, &mut |byte, _| byte % 2 == 0);
    let _ = index.reclaim(20, 5, &mut |_, _| false);
    let _ = index.deregister_client(owner);
    let _ = (index.stats(), index.violations(), index.client_infos(), index.namespace_infos());
}

fn poke_key(index: &mut Index<'_>, namespace: &NamespaceKey, owner: ClientRef, key: u64) {
    let digest = digest(key);
    let request =
        SaveRequest { key: "k", digest, rows: 1 + key, row_bytes: 5000, modality: 1, participants: key % 3, owner };
    let _ = index.get(&digest, namespace);
    let _ = index.contains(&digest, namespace);
    if let Ok(Some(lease)) =
        index.lease(&digest, namespace, &Expected { rows: Some(1 + key), ..Expected::default() }, owner)
    {
        let _ = index.dispatch_load(lease.id, 0b11);
        poke_transfer(index, lease.id);
    }
    let _ = index.begin_save(&request, namespace);
    let _ = index.end_writing(&digest, namespace, owner, true);
    let _ = index.pin(&digest, namespace, owner);
    let _ = index.unpin(&digest, namespace, owner);
    let _ = index.end_writing(&digest, namespace, owner, false);
    let _ = index.alloc(&request, namespace, key);
    let _ = index.is_written_elsewhere(&digest, namespace, owner);
}

fn poke_transfer(index: &mut Index<'_>, id: u64) {
    let Some(uint8) = dtype::by_name("uint8") else { return };
    let Some(shape) = SaveShape::new(&[1, 5000], uint8) else { return };
    let _ = index.claim_save(0, id, &shape);
    let _ = index.claim_load(1, id);
    let _ = index.is_unclaimed(id);
    let _ = index.set_checksum(id, 9);
    let _ = index.complete(0, id, true);
    let _ = index.complete(1, id, false);
    let _ = index.close_unclaimed(id);
    let _ = index.confirm(id, false);
    let _ = index.end_lease(id);
    let _ = index.finish_save(id);
    let _ = index.finish_load(id);
    let _ = index.withdraw(id);
}
