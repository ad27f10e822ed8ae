PRAGMA user_version = 1;
BEGIN TRANSACTION;
CREATE TABLE checkpoint (
	checkpoint_digest VARCHAR(64) NOT NULL, 
	weights_digest VARCHAR(64) NOT NULL, 
	format VARCHAR NOT NULL, 
	format_version VARCHAR, 
	kind VARCHAR NOT NULL, 
	step BIGINT, 
	tensors BIGINT NOT NULL, 
	parameters BIGINT NOT NULL, 
	nbytes BIGINT NOT NULL, 
	PRIMARY KEY (checkpoint_digest)
);
INSERT INTO "checkpoint" VALUES('9340198b99814ecc85208017d5e17557e3cf4ecb89f3762e8c261c4c138e267d','69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974','t5x',NULL,'params',100,2,17,68);
INSERT INTO "checkpoint" VALUES('6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26','69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974','orbax',NULL,'params',NULL,2,17,68);
INSERT INTO "checkpoint" VALUES('3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee','69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974','huggingface',NULL,'params',NULL,2,17,68);
INSERT INTO "checkpoint" VALUES('fd0b3ec4eab14943e955e696eae9030f7738ec584b9645c68d9d2b092b9f6244','897bcc836c3cc5bc21fda78ba17299c2f433904f1b5fc178ea8681b522911b7d','dcp',NULL,'params',NULL,2,17,68);
INSERT INTO "checkpoint" VALUES('b9d17232a4c83d9928ee0d4e6fab81d3802cd3bf898149558e1abf8b24e1ba49','69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974','t5x',NULL,'params',NULL,2,17,68);
INSERT INTO "checkpoint" VALUES('ee56583a430778354d4b1b8cfd624cc00a476fe9353c4f793ae9e198bcdeab16','69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974','huggingface',NULL,'params',NULL,2,17,68);
CREATE TABLE edge (
	source VARCHAR(64) NOT NULL, 
	target VARCHAR(64) NOT NULL, 
	plan_digest VARCHAR(64) NOT NULL, 
	statement INTEGER NOT NULL, 
	UNIQUE (source, target, plan_digest), 
	FOREIGN KEY(source) REFERENCES checkpoint (checkpoint_digest), 
	FOREIGN KEY(target) REFERENCES checkpoint (checkpoint_digest), 
	FOREIGN KEY(statement) REFERENCES statement (seq)
);
INSERT INTO "edge" VALUES('9340198b99814ecc85208017d5e17557e3cf4ecb89f3762e8c261c4c138e267d','6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26','4b29051ea5cec38a961d064308a01dace2835d6756be84b7fb6609c0ff3c8f1b',1);
INSERT INTO "edge" VALUES('6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26','3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee','c58801ff5347882c3e2b5f6a674de035e61dcc15ac314c54d745c0a69f8087f6',2);
INSERT INTO "edge" VALUES('b9d17232a4c83d9928ee0d4e6fab81d3802cd3bf898149558e1abf8b24e1ba49','ee56583a430778354d4b1b8cfd624cc00a476fe9353c4f793ae9e198bcdeab16','96b8ef9c2838f5f5a329871e0268cd4274dc2fa6fb59f4b7e99810fb0474aeed',8);
CREATE TABLE location (
	checkpoint_digest VARCHAR(64) NOT NULL, 
	uri VARCHAR NOT NULL, 
	fingerprint VARCHAR NOT NULL, 
	seen VARCHAR NOT NULL, 
	UNIQUE (checkpoint_digest, uri), 
	FOREIGN KEY(checkpoint_digest) REFERENCES checkpoint (checkpoint_digest)
);
INSERT INTO "location" VALUES('9340198b99814ecc85208017d5e17557e3cf4ecb89f3762e8c261c4c138e267d','/checkpoints/run/100','41007749b2f4dfe981be1eefc119cd1a1ea8434b83b1804f2da7590a42718506','2026-11-02T00:00:27.000+00:00');
INSERT INTO "location" VALUES('6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26','/checkpoints/run-orbax','f2f29aa003f34aad543d34a3e5a482e632e33e48b4bc6691105815cfc063a2bd','2026-11-02T00:00:28.000+00:00');
INSERT INTO "location" VALUES('3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee','/checkpoints/run-hf','2721cedef9a1810ae9e260f259f4f0d73cd50cc1a377f25eaeb08e7222625249','2026-11-02T00:00:18.000+00:00');
INSERT INTO "location" VALUES('6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26','/archive/run-orbax','f2f29aa003f34aad543d34a3e5a482e632e33e48b4bc6691105815cfc063a2bd','2026-11-02T00:00:07.000+00:00');
INSERT INTO "location" VALUES('fd0b3ec4eab14943e955e696eae9030f7738ec584b9645c68d9d2b092b9f6244','/checkpoints/only-verified','3a503e7e3aae8ed3e54b2dfe58bad908283458c9d7cc7815f49ac8d9e4ad190d','2026-11-02T00:00:23.000+00:00');
INSERT INTO "location" VALUES('b9d17232a4c83d9928ee0d4e6fab81d3802cd3bf898149558e1abf8b24e1ba49','/checkpoints/run/100','0c3ec1e30edcde1e52fbc6f027ba48f283036f0ae9f513c96ba4d7102db2c9d0','2026-11-02T00:00:24.000+00:00');
INSERT INTO "location" VALUES('ee56583a430778354d4b1b8cfd624cc00a476fe9353c4f793ae9e198bcdeab16','/checkpoints/run-2-hf','ee699d30340209fad34809d85b292c4173b675e4fd059e1d074b63efee820e16','2026-11-02T00:00:25.000+00:00');
CREATE TABLE registration (
	checkpoint_digest VARCHAR(64) NOT NULL, 
	registry VARCHAR NOT NULL, 
	name VARCHAR NOT NULL, 
	state VARCHAR NOT NULL, 
	version VARCHAR, 
	seen VARCHAR NOT NULL, 
	UNIQUE (checkpoint_digest, registry, name), 
	FOREIGN KEY(checkpoint_digest) REFERENCES checkpoint (checkpoint_digest)
);
INSERT INTO "registration" VALUES('3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee','https://models.example','model','registered','1','2026-11-02T00:00:17.000+00:00');
INSERT INTO "registration" VALUES('6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26','https://models.example','model','pending',NULL,'2026-11-02T00:00:20.000+00:00');
CREATE TABLE statement (
	seq INTEGER NOT NULL, 
	prev VARCHAR(64) NOT NULL, 
	hash VARCHAR(64) NOT NULL, 
	kind VARCHAR NOT NULL, 
	schema INTEGER NOT NULL, 
	content VARCHAR(64) NOT NULL, 
	body TEXT NOT NULL, 
	time VARCHAR NOT NULL, 
	PRIMARY KEY (seq), 
	UNIQUE (hash)
);
INSERT INTO "statement" VALUES(1,'0000000000000000000000000000000000000000000000000000000000000000','21a0f8866d318fdd4e0a9848e30336264087327f206c970c75b0fe7c24b2572e','conversion',1,'f43c50888689db85c42f7d69b848f1fca99b62897bc103c4220db5df079eb2b9','{"bytes_read":0,"bytes_written":0,"finished":"2026-11-01T02:10:30.000+00:00","group":"","lossless":true,"note":null,"options":{"scan_layers":true},"plan_digest":"4b29051ea5cec38a961d064308a01dace2835d6756be84b7fb6609c0ff3c8f1b","resumed_bytes":0,"schema":1,"seconds":30.0,"snippet":"","software":{"wherry":"0.1.0"},"source":{"checkpoint_digest":"9340198b99814ecc85208017d5e17557e3cf4ecb89f3762e8c261c4c138e267d","fingerprint":"41007749b2f4dfe981be1eefc119cd1a1ea8434b83b1804f2da7590a42718506","format":"t5x","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":100,"tensors":2,"uri":"/checkpoints/run/100","weights_digest":"69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"started":"2026-11-01T02:10:00.000+00:00","target":{"checkpoint_digest":"6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26","fingerprint":"f2f29aa003f34aad543d34a3e5a482e632e33e48b4bc6691105815cfc063a2bd","format":"orbax","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-orbax","weights_digest":"69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"verification":{"level":"digest","ok":true},"warnings":[]}','2026-11-02T00:00:02.000+00:00');
INSERT INTO "statement" VALUES(2,'21a0f8866d318fdd4e0a9848e30336264087327f206c970c75b0fe7c24b2572e','3171be93db931d5f46afb6c79083aa6a347486b470e612eace2c79aeba49bcfa','conversion',1,'0aaee9cafc105bbcffed20f35ba9b651bc69ca605afbf1ed86dd20a2c95a1895','{"bytes_read":0,"bytes_written":0,"finished":"2026-11-01T02:20:30.000+00:00","group":"","lossless":false,"note":null,"options":{"scan_layers":true},"plan_digest":"c58801ff5347882c3e2b5f6a674de035e61dcc15ac314c54d745c0a69f8087f6","resumed_bytes":0,"schema":1,"seconds":30.0,"snippet":"","software":{"wherry":"0.1.0"},"source":{"checkpoint_digest":"6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26","fingerprint":"f2f29aa003f34aad543d34a3e5a482e632e33e48b4bc6691105815cfc063a2bd","format":"orbax","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-orbax","weights_digest":"69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"started":"2026-11-01T02:20:00.000+00:00","target":{"checkpoint_digest":"3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee","fingerprint":"2721cedef9a1810ae9e260f259f4f0d73cd50cc1a377f25eaeb08e7222625249","format":"huggingface","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-hf","weights_digest":"69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"verification":{"level":"digest","ok":true},"warnings":[]}','2026-11-02T00:00:05.000+00:00');
INSERT INTO "statement" VALUES(3,'3171be93db931d5f46afb6c79083aa6a347486b470e612eace2c79aeba49bcfa','1347e0594923efa453ddf8009f761db390d5005a63a7e37a7e4b24ff0680b599','conversion',1,'b0d577ba4e6ed0242d7f7f600303dda87f870feed8d9efd898f4d1c004071663','{"bytes_read":0,"bytes_written":0,"finished":"2026-11-01T02:30:30.000+00:00","group":"","lossless":true,"note":null,"options":{"scan_layers":true},"plan_digest":"cdf09957368ab6fe13f51c56dbdf32ac7d393f3943c1ff1dab14e34090b93072","resumed_bytes":0,"schema":1,"seconds":30.0,"snippet":"","software":{"wherry":"0.1.0"},"source":{"checkpoint_digest":"6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26","fingerprint":"f2f29aa003f34aad543d34a3e5a482e632e33e48b4bc6691105815cfc063a2bd","format":"orbax","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-orbax","weights_digest":"69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"started":"2026-11-01T02:30:00.000+00:00","target":{"checkpoint_digest":"6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26","fingerprint":"f2f29aa003f34aad543d34a3e5a482e632e33e48b4bc6691105815cfc063a2bd","format":"orbax","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/archive/run-orbax","weights_digest":"69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"verification":{"level":"digest","ok":true},"warnings":[]}','2026-11-02T00:00:08.000+00:00');
INSERT INTO "statement" VALUES(4,'1347e0594923efa453ddf8009f761db390d5005a63a7e37a7e4b24ff0680b599','5e797126168a7f12c194ec309d51fc743dfe3fb08b0b10ab6af465a3f609de8c','verification',1,'bba200c76d21cf08c6b2529efc8dfc034083e07395332b64f7ffb82022b52995','{"checkpoint_digest":"3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee","verification":{"level":"present","ok":true,"verdict":"ok"}}','2026-11-02T00:00:10.000+00:00');
INSERT INTO "statement" VALUES(5,'5e797126168a7f12c194ec309d51fc743dfe3fb08b0b10ab6af465a3f609de8c','69ba334ed9276c10a5390c63eb2dce2c35fbfce2a7548fe328f91bde950e2c14','verification',1,'fb1912df3e231f307527247ddf669ea5400b3c6c8973d466ecf30802bb258cfc','{"checkpoint_digest":"3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee","verification":{"level":"digest","ok":false,"verdict":"altered"}}','2026-11-02T00:00:12.000+00:00');
INSERT INTO "statement" VALUES(6,'69ba334ed9276c10a5390c63eb2dce2c35fbfce2a7548fe328f91bde950e2c14','01f7e3767bb28ff5133ecdde9dfdcee041c167f437a9e252836a7002457247ac','verification',1,'71af19ae6b97ac6481d9d7d78d9d65e001a779c7240ba40cab64f1b4ebe5172d','{"checkpoint_digest":"fd0b3ec4eab14943e955e696eae9030f7738ec584b9645c68d9d2b092b9f6244","verification":{"level":"digest","ok":true,"verdict":"ok"}}','2026-11-02T00:00:14.000+00:00');
INSERT INTO "statement" VALUES(7,'01f7e3767bb28ff5133ecdde9dfdcee041c167f437a9e252836a7002457247ac','ecc4b09bd004e4b27ad3151976ec7f5806f54fded074bbe25853fe166e5f8a63','registration',1,'72ed58e639904819c2532dd2613a5beea88d129b3668dc00e10d918d34ef329c','{"checkpoint_digest":"3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee","name":"model","registry":"https://models.example","version":"1"}','2026-11-02T00:00:19.000+00:00');
INSERT INTO "statement" VALUES(8,'ecc4b09bd004e4b27ad3151976ec7f5806f54fded074bbe25853fe166e5f8a63','70ccaf30c629e66bbd03055b09b89444f15a82addb3d092b0dff6ae64069551a','conversion',1,'0eae35829d224c442b23516cd0678e62d00e6b6ec56c927b71e3d84b4d8f679e','{"bytes_read":0,"bytes_written":0,"finished":"2026-11-01T02:40:30.000+00:00","group":"","lossless":true,"note":null,"options":{"scan_layers":true},"plan_digest":"96b8ef9c2838f5f5a329871e0268cd4274dc2fa6fb59f4b7e99810fb0474aeed","resumed_bytes":0,"schema":1,"seconds":30.0,"snippet":"","software":{"wherry":"0.1.0"},"source":{"checkpoint_digest":"b9d17232a4c83d9928ee0d4e6fab81d3802cd3bf898149558e1abf8b24e1ba49","fingerprint":"0c3ec1e30edcde1e52fbc6f027ba48f283036f0ae9f513c96ba4d7102db2c9d0","format":"t5x","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run/100","weights_digest":"69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"started":"2026-11-01T02:40:00.000+00:00","target":{"checkpoint_digest":"ee56583a430778354d4b1b8cfd624cc00a476fe9353c4f793ae9e198bcdeab16","fingerprint":"ee699d30340209fad34809d85b292c4173b675e4fd059e1d074b63efee820e16","format":"huggingface","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-2-hf","weights_digest":"69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"verification":{"level":"digest","ok":true},"warnings":[]}','2026-11-02T00:00:26.000+00:00');
CREATE INDEX ix_checkpoint_weights_digest ON checkpoint (weights_digest);
CREATE INDEX ix_statement_content ON statement (content);
CREATE INDEX ix_location_uri ON location (uri);
CREATE INDEX ix_edge_target ON edge (target);
CREATE INDEX registration_name ON registration (registry, name);
CREATE TRIGGER statement_no_update BEFORE UPDATE ON statement BEGIN SELECT RAISE(ABORT, 'the ledger is append-only: statement'); END;
CREATE TRIGGER statement_no_delete BEFORE DELETE ON statement BEGIN SELECT RAISE(ABORT, 'the ledger is append-only: statement'); END;
CREATE TRIGGER edge_no_update BEFORE UPDATE ON edge BEGIN SELECT RAISE(ABORT, 'the ledger is append-only: edge'); END;
CREATE TRIGGER edge_no_delete BEFORE DELETE ON edge BEGIN SELECT RAISE(ABORT, 'the ledger is append-only: edge'); END;
COMMIT;
