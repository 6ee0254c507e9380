//! Files that are no region, or one with changed bytes: attaching gives an error or a pool that works.

use std::cell::RefCell;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use arbitrary::{Arbitrary, Unstructured};
use ecpool_core::cache::EmbeddingCache;
use ecpool_core::client::{Client, Introduction};
use ecpool_core::geometry::GeometryRequest;
use ecpool_core::index::{Expected, Role};
use ecpool_core::region::{Lifetime, OpenRequest, Region};

const NAME: &str = "fuzz";
const WAIT: Duration = Duration::from_secs(5);
/// Where the header's check is, and what it covers.
const CHECK: usize = 64;
/// Where it says how long the file is.
const FILE_LEN: usize = 56;
/// Files that say they are larger are left out: that many real pages would only be slow.
const MOST_BYTES: u64 = 64 << 20;
/// Patches reach the header, the shared words and the index.
const REACH: u64 = 1 << 18;

#[derive(Debug, Arbitrary)]
enum Content {
    Whole(Vec<u8>),
    Changed { patches: Vec<(u32, u64)>, with_right_check: bool, length: Option<u32> },
}

struct World {
    _parent: tempfile::TempDir,
    directory: PathBuf,
    /// A sound persistent region with a few entries, and its file's path.
    sound: Vec<u8>,
    file: PathBuf,
}

thread_local! {
    static WORLD: RefCell<Option<World>> = const { RefCell::new(None) };
}

fn open(directory: &Path) -> Client {
    let geometry = GeometryRequest { capacity: 24 * 4096, block_size: 4096, segment_size: 2 << 20, num_slots: Some(6) };
    let request = OpenRequest { directory: Some(directory), name: NAME, geometry, lifetime: Lifetime::Persistent };
    let region = Region::open(&request, &mut |_, _, _| ControlFlow::Continue(())).expect("there is room");
    introduce(region).expect("nobody else is there")
}

fn introduce(region: Region) -> ecpool_core::Result<Client> {
    Client::in_region(region, &Introduction { role: Role::Pool, rank: 0, group: "fuzz" })
}

/// Damage that no operation met is none of theirs; after a rebuild nothing may be wrong, whatever is done.
fn use_it(client: Client) {
    let cache = EmbeddingCache::new(Arc::new(client), "n");
    store_some(&cache);
    let _ = (cache.client().people(), cache.client().total_counters(), cache.client().reclaim());
    let rebuilt = cache.client().with(WAIT, |index| index.rebuild(7));
    rebuilt.expect("any content can be rebuilt");
    assert_eq!(cache.client().violations().expect("it is usable"), Vec::<String>::new());
    store_some(&cache);
    assert_eq!(cache.client().violations().expect("it is usable"), Vec::<String>::new());
}

fn store_some(cache: &EmbeddingCache) {
    for key in ["a", "b", "c"] {
        let _ = cache.lease(WAIT, key, &Expected::default());
        if let Ok(Some(_)) = cache.alloc(WAIT, key, 7) {
            let _ = cache.mark_ready(WAIT, key);
        }
        let _ = cache.contains(WAIT, key);
    }
    let _ = cache.flush();
}

impl World {
    fn new() -> Self {
        let parent = tempfile::tempdir_in("/dev/shm").expect("there is room");
        let directory = parent.path().join("pools");
        let client = open(&directory);
        let file = client.region().expect("it is in a region").path().to_owned();
        use_it(client);
        let sound = std::fs::read(&file).expect("it is ours");
        let check = blake3::hash(&sound[..CHECK]);
        assert_eq!(
            sound[CHECK..CHECK + 8],
            check.as_bytes()[..8],
            "the header is not where this target takes it to be"
        );
        Self { _parent: parent, directory, sound, file }
    }

    /// Writes the file that an input asks for; false for one that would only be slow.
    fn write(&self, content: &Content) -> bool {
        let bytes = match content {
            Content::Whole(bytes) => bytes.clone(),
            Content::Changed { patches, with_right_check, length } => {
                let mut bytes = self.sound.clone();
                for (at, value) in patches {
                    let at = (u64::from(*at) % REACH) as usize;
                    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
                }
                if *with_right_check {
                    let check = blake3::hash(&bytes[..CHECK]);
                    bytes[CHECK..CHECK + 8].copy_from_slice(&check.as_bytes()[..8]);
                }
                bytes.truncate(length.map_or(bytes.len(), |length| length as usize % (bytes.len() + 1)));
                bytes
            }
        };
        let said = bytes.get(FILE_LEN..CHECK).map_or(0, |len| u64::from_le_bytes(len.try_into().expect("eight bytes")));
        if said > MOST_BYTES {
            return false;
        }
        // In place, since the name must lead to a file of our own with its mode.
        let file = std::fs::OpenOptions::new().write(true).open(&self.file).expect("it is ours");
        file.set_len(0).and_then(|()| file.write_all_at(&bytes, 0)).expect("there is room");
        true
    }
}

/// Runs one input.
pub fn run(data: &[u8]) {
    let Ok(content) = Content::arbitrary(&mut Unstructured::new(data)) else { return };
    WORLD.with_borrow_mut(|world| {
        let world = world.get_or_insert_with(World::new);
        if !world.write(&content) {
            return;
        }
        let attached = Region::attach(Some(&world.directory), NAME, &mut |_, _, _| ControlFlow::Continue(()));
        match attached.and_then(introduce) {
            Ok(client) => use_it(client),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
        if !world.file.exists() {
            // What called itself shared was removed by its last user, as is right.
            *world = World::new();
        }
    });
}
